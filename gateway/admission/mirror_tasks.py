"""The copies of requests that a worker has in flight, with a bound for each model.

The rules: a copy that finds no capacity is not sent, and never waits. All copies end at once when the worker drains.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any


class MirrorTasks:
    """The tasks of copies, by the model whose requests are copied."""

    def __init__(self) -> None:
        self._running: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self.closed = False

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))

    def start(self, model: str, most: int, run: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Start a copy of a request for a model, unless ``most`` are in flight or the worker drains. Returns whether it was started."""
        running = self._running[model]
        if self.closed or len(running) >= most:
            return False
        task = asyncio.create_task(run(), name=f"mirror {model}")
        running.add(task)
        task.add_done_callback(running.discard)
        return True

    def close(self) -> None:
        """Cancel all copies, and start no more."""
        self.closed = True
        for running in self._running.values():
            for task in tuple(running):
                task.cancel()
