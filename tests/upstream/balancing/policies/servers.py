"""Servers and candidates for the tests of policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from upstream.balancing.ranking import CandidateList


@dataclass(eq=False)
class FakeServer:
    """A server, as far as a policy knows it."""

    name: str = "s"
    weight: float = 1.0
    in_flight: int = 0

    @property
    def load(self) -> float:
        return self.in_flight / self.weight


def named(names: Iterable[str]) -> list[FakeServer]:
    return [FakeServer(name) for name in names]


def candidates(servers: Sequence[FakeServer], offset: int = 0) -> CandidateList[FakeServer]:
    return CandidateList(servers, offset)
