"""Tokens per second, from looks at counters that only grow.

Pure. The rule: a rate is between the newest look and the oldest one within the window, so it follows what happens
and does not jump with every request's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW = 10.0
"""Seconds. Tokens are counted at a request's end, so a shorter window would mostly show nothing."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens, or tokens per second."""

    prompt: float = 0.0
    completion: float = 0.0


class Rates:
    """The latest looks, oldest first."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._looks: deque[tuple[float, Mapping[str, Tokens]]] = deque()

    def look(self, now: float, totals: Mapping[str, Tokens]) -> None:
        """Take note of what each model has counted at ``now``, in seconds of a clock that never goes back."""
        self._looks.append((now, totals))
        while now - self._looks[0][0] > self._window:
            self._looks.popleft()

    def of(self, model: str) -> Tokens:
        """Tokens per second; nothing until there were two looks."""
        if len(self._looks) < 2:
            return Tokens()
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        old, new = before.get(model, Tokens()), after.get(model, Tokens())
        return Tokens((new.prompt - old.prompt) / (last - first), (new.completion - old.completion) / (last - first))
