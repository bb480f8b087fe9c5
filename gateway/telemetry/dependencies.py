"""Track what the gateway depends on besides the vLLM servers: the state of each dependency, since when, and its last error.

The rule: the parts that use a dependency observe it; only changes are dated here. A dependency that is not configured, or was not
used yet, is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gateway.telemetry.metrics import Series

NAMES = ("limits_store", "ledger_database", "ledger_spool", "identity_provider", "discovery", "kv_events")


@dataclass(frozen=True, slots=True)
class Observation:
    """The current state of a dependency, without secrets.

    ``name`` is one of NAMES; ``subject`` distinguishes several dependencies with the same name, such as the URL of an issuer or the id of a
    model; ``error`` is None while it works.
    """

    name: str
    subject: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Dependency:
    """One dependency. ``since``: seconds since the epoch. ``last_error`` stays when it works again; it is empty before the first."""

    name: str
    subject: str
    is_up: bool
    since: float
    last_error: str

    def as_json(self) -> dict[str, Any]:
        """Return the entry of /status."""
        state = "up" if self.is_up else "down"
        return {"name": self.name, "subject": self.subject, "state": state, "since": self.since, "last_error": self.last_error}


class Dependencies:
    """All dependencies, in the order of the observations."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Dependency] = {}

    def observe(self, observations: Iterable[Observation], now: float) -> None:
        """Apply observations that were made at ``now``, in seconds since the epoch. Dependencies without an observation are removed."""
        self._known = {(each.name, each.subject): self._observed(each, now) for each in observations}

    def _observed(self, each: Observation, now: float) -> Dependency:
        before = self._known.get((each.name, each.subject))
        up = each.error is None
        if before is None:
            return Dependency(each.name, each.subject, up, now, each.error or "")
        since = before.since if before.is_up is up else now
        return replace(before, is_up=up, since=since, last_error=each.error or before.last_error)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the list of /status."""
        return [each.as_json() for each in self._known.values()]

    def down(self) -> list[str]:
        """Return the names of dependencies that do not work, each once."""
        return list(dict.fromkeys(each.name for each in self._known.values() if not each.is_up))

    def series(self) -> Iterator[tuple[Series, float]]:
        """Return for each known name 1 while all dependencies of that name work, otherwise 0."""
        down = set(self.down())
        for name in dict.fromkeys(each.name for each in self._known.values()):
            yield Series("dependency_up", (name,)), float(name not in down)
