"""The ways to choose a server: the gateway's own code, and the idea of a tree of what was sent where.

``Tree`` is the idea of the cache-aware policy of SGLang's router, from which vLLM's comes, in our own words and with the default
numbers of vllm-router 0.1.17; it is not their code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.proxy.prefix import affinity_key
from tests.benchmarks.prefix.traces import Segment, document
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.policy import Policy, RequestFacts
from upstream.balancing.ranking import CandidateList


@dataclass(eq=False)
class Machine:
    """A server, as a chooser sees it."""

    name: str
    in_flight: int = 0
    weight: float = 1.0
    tokens_in_flight: int = 0

    @property
    def load(self) -> float:
        return self.in_flight / self.weight


class Chooser(Protocol):
    """Chooses for one gateway, in the order of the requests."""

    def __call__(self, prompt: tuple[Segment, ...]) -> Machine:
        """The server for a prompt."""


class _InRotation(CandidateList[Machine]):
    """All machines. Those with the same load take turns."""

    def least_busy(self) -> Machine:
        machine = super().least_busy()
        self.offset += 1
        return machine


def by_policy(balance: str) -> Callable[[Sequence[Machine]], Chooser]:
    """The gateway's own policy of this name."""

    def chooser(machines: Sequence[Machine]) -> Chooser:
        policy: Policy[Machine] = POLICIES[balance](machines)
        candidates = _InRotation(machines, 0)

        def choose(prompt: tuple[Segment, ...]) -> Machine:
            key = affinity_key(document(prompt)) if "affinity_key" in policy.requires else None
            return policy.choose(candidates, RequestFacts(key))

        return choose

    return chooser


THRESHOLD, APART, TIMES = 0.3, 64, 1.5
"""The share of a prompt's text that must be cached to count, and the difference and ratio of loads above which the least busy is chosen."""


@dataclass(eq=False)
class _Node:
    below: dict[int, _Node] = field(default_factory=dict)
    owners: dict[Machine, None] = field(default_factory=dict)  # the latest last


class Tree:
    """Remembers every prompt by the server that got it. Its nodes are whole segments: ours share no part of one."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self._root = _Node()
        self._sizes = dict.fromkeys(machines, 0)

    def __call__(self, prompt: tuple[Segment, ...]) -> Machine:
        chosen = self._choose(prompt)
        node = self._root
        for segment in prompt:
            node = node.below.setdefault(segment.number, _Node())
            if node.owners.pop(chosen, self) is self:
                self._sizes[chosen] += segment.tokens
            node.owners[chosen] = None
        return chosen

    def _choose(self, prompt: tuple[Segment, ...]) -> Machine:
        least, most = (by(self._machines, key=lambda machine: machine.in_flight) for by in (min, max))
        if most.in_flight - least.in_flight > APART and most.in_flight > least.in_flight * TIMES:
            return least
        owner, known = self._longest(prompt)
        if owner is not None and known > THRESHOLD * sum(segment.tokens for segment in prompt):
            return owner
        return min(self._machines, key=lambda machine: self._sizes[machine])

    def _longest(self, prompt: tuple[Segment, ...]) -> tuple[Machine | None, int]:
        node, known, owner = self._root, 0, None
        for segment in prompt:
            if segment.number not in node.below:
                break
            node = node.below[segment.number]
            known += segment.tokens
            owner = next(reversed(node.owners))
        return owner, known


CHOOSERS: Mapping[str, Callable[[Sequence[Machine]], Chooser]] = {
    **{f"`{balance}`": by_policy(balance) for balance in ("round_robin", "least_busy", "prefix")},
    "tree": Tree,
}
