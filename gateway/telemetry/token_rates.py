"""Compute tokens per second from counters that only grow. Pure.

The rule: a rate is between the latest observation and the oldest one within the window, so it follows the load without jumping at
the end of each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 10.0
"""Seconds. Tokens are counted when a request ends, so a shorter window would mostly show 0."""


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """Tokens, or tokens per second."""

    prompt: float = 0.0
    completion: float = 0.0


class TokenRates:
    """The latest observations, oldest first."""

    def __init__(self) -> None:
        self._observations: deque[tuple[float, Mapping[str, ModelTokens]]] = deque()

    def observe(self, now: float, totals: Mapping[str, ModelTokens]) -> None:
        """Add the count of each model at ``now``, in seconds of a monotonic clock."""
        self._observations.append((now, totals))
        while now - self._observations[0][0] > WINDOW:
            self._observations.popleft()

    @property
    def latest(self) -> tuple[float, Mapping[str, ModelTokens]] | None:
        """The latest observation: its time, and the count of each model."""
        return self._observations[-1] if self._observations else None

    def rate(self, model: str) -> ModelTokens:
        """Return a model's tokens per second; 0 until there are two observations."""
        if len(self._observations) < 2:
            return ModelTokens()
        (first, before), (last, after) = self._observations[0], self._observations[-1]
        old, new = before.get(model, ModelTokens()), after.get(model, ModelTokens())
        return ModelTokens((new.prompt - old.prompt) / (last - first), (new.completion - old.completion) / (last - first))
