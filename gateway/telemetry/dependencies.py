"""What the gateway depends on besides the vLLM servers: whether each dependency works, since when, and its last error.

The rule: the parts that use a dependency observe it, and only a change is dated here. A dependency that is not configured, or
that was not used yet, is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gateway.telemetry.metrics import Series

NAMES = ("limits_store", "ledger_database", "ledger_spool", "identity_provider", "discovery")


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known now. ``name`` is one of NAMES; ``subject`` tells several of a name apart, such as the URL of an issuer or the id of a
    model; ``error`` says why it does not work, None while it works. It holds no secret."""

    name: str
    subject: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Dependency:
    """One dependency. ``since``: seconds since the epoch; ``last_error`` stays when the dependency works again, and is empty before the
    first one."""

    name: str
    subject: str
    is_up: bool
    since: float
    last_error: str

    def shown(self) -> dict[str, Any]:
        """The entry of /status."""
        state = "up" if self.is_up else "down"
        return {"name": self.name, "subject": self.subject, "state": state, "since": self.since, "last_error": self.last_error}


class Dependencies:
    """All dependencies, in the order of the observations."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Dependency] = {}

    def observe(self, observations: Iterable[Observation], now: float) -> None:
        """Take over what is observed at a moment, in seconds since the epoch; what is not observed any more is not listed any more."""
        self._known = {(one.name, one.subject): self._observed(one, now) for one in observations}

    def _observed(self, one: Observation, now: float) -> Dependency:
        before = self._known.get((one.name, one.subject))
        up = one.error is None
        if before is None:
            return Dependency(one.name, one.subject, up, now, one.error or "")
        since = before.since if before.is_up is up else now
        return replace(before, is_up=up, since=since, last_error=one.error or before.last_error)

    def shown(self) -> list[dict[str, Any]]:
        """The list of /status."""
        return [one.shown() for one in self._known.values()]

    def down(self) -> list[str]:
        """The names of those that do not work, each once."""
        return list(dict.fromkeys(one.name for one in self._known.values() if not one.is_up))

    def series(self) -> Iterator[tuple[Series, float]]:
        """For each name that is known, 1 while all of that name work."""
        down = set(self.down())
        for name in dict.fromkeys(one.name for one in self._known.values()):
            yield Series("dependency_up", (name,)), float(name not in down)
