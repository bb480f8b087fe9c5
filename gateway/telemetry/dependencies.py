"""Track what the gateway depends on besides the vLLM servers: the state of each dependency, since when, and its last error.

The rules: the parts that use a dependency observe it, by the operation for which they need it; only changes are dated here. A dependency
that is not configured, or was not used yet, is not listed. The states are ``up``, ``down``, and ``degraded``: it works, but not for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gateway.telemetry.metrics import Series

NAMES = (
    "limits_store",
    "ledger_database",
    "ledger_spool",
    "key_store",
    "audit_log",
    "identity_provider",
    "discovery",
    "kv_events",
    "certificate",
)


@dataclass(frozen=True, slots=True)
class Observation:
    """The current state of a dependency, without secrets.

    ``name`` is one of NAMES. ``subject`` distinguishes several dependencies with the same name, such as the URL of an issuer or the id of a
    model. ``error`` is None while it works, and ``warning`` says why it will not work for long.
    """

    name: str
    subject: str = ""
    error: str | None = None
    warning: str | None = None

    @property
    def state(self) -> str:
        """The state that follows from what was observed."""
        return "down" if self.error is not None else "up" if self.warning is None else "degraded"


@dataclass(frozen=True, slots=True)
class Dependency:
    """One dependency. ``since``: seconds since the epoch. ``last_error``, which may be a warning, stays when it works again."""

    name: str
    subject: str
    state: str
    since: float
    last_error: str


class Dependencies:
    """All dependencies, in the order of the observations."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Dependency] = {}

    def observe(self, observations: Iterable[Observation], now: float) -> None:
        """Apply observations that were made at ``now``, in seconds since the epoch. Dependencies without an observation are removed."""
        self._known = {(each.name, each.subject): self._observed(each, now) for each in observations}

    def _observed(self, each: Observation, now: float) -> Dependency:
        before = self._known.get((each.name, each.subject)) or Dependency(each.name, each.subject, each.state, now, "")
        since = before.since if before.state == each.state else now
        return Dependency(each.name, each.subject, each.state, since, each.error or each.warning or before.last_error)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the list of /status."""
        return [asdict(each) for each in self._known.values()]

    def down(self) -> list[str]:
        """Return the names of dependencies that do not work, each once."""
        return list(dict.fromkeys(each.name for each in self._known.values() if each.state == "down"))

    def series(self) -> Iterator[tuple[Series, float]]:
        """Return for each known name 1 while no dependency of that name is down, otherwise 0."""
        down = set(self.down())
        for name in dict.fromkeys(each.name for each in self._known.values()):
            yield Series("dependency_up", (name,)), float(name not in down)
