"""The counts of launches and of their failures, from the states that the launcher reports."""

from __future__ import annotations

from collections import Counter

from gateway.config import Config
from gateway.fleet.configured_servers import model_of_launched
from upstream.launcher.lifecycle import LaunchState, LaunchStatus

_OUTCOMES = {LaunchState.READY: "ready", LaunchState.FAILED: "failed"}


class LaunchCounts:
    """Launches by model and outcome, and failures by model and cause."""

    def __init__(self) -> None:
        self._states: dict[str, LaunchState] = {}
        self.launches: dict[tuple[str, str], int] = {}
        self.failures: Counter[tuple[str, str]] = Counter()

    def expect(self, config: Config) -> None:
        """Start every count of the configuration's models at 0, so that Prometheus sees the first increase."""
        for model in config.models:
            if model.launch is not None:
                for outcome in _OUTCOMES.values():
                    self.launches.setdefault((model.id, outcome), 0)

    def state(self, server: str) -> LaunchState | None:
        """Return the last state of a launched server, None for any other server."""
        return self._states.get(server)

    def record(self, status: LaunchStatus) -> bool:
        """Record a status. Returns whether the server has entered another state."""
        before, model = self._states.get(status.name), model_of_launched(status.name)
        self._states[status.name] = status.state
        if before is status.state:
            return False
        if before is LaunchState.STARTING and status.state in _OUTCOMES:
            self.launches[model, _OUTCOMES[status.state]] += 1
        if status.state in (LaunchState.FAILED, LaunchState.CRASHED) and status.cause is not None:
            self.failures[model, status.cause.code] += 1
        return True
