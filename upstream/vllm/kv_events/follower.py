"""Follow the events of one engine: put them in order, notice what was lost, and decide what to replay. Pure.

vLLM numbers its batches from 0, and keeps the last ones for a replay. The rules:

* A batch is applied only after its predecessor. After a gap, the missing batches are replayed.
* A replay after a gap begins with the batch that was applied last. If that batch is a different one now, another engine has answered. If
  it is missing, the buffer no longer has it. In both cases, everything that was known is forgotten. The result therefore never
  contains a block that may have been evicted. It may lack blocks that were stored before the first batch of the buffer.
* New batches wait while a replay runs, up to ``_WAITING``. The others are lost, and replayed next.

The sockets are in ``subscriber``.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from upstream.vllm.kv_events.batch import Batch, decode_batch
from upstream.vllm.kv_events.blocks import Changes, EngineBlocks

_WAITING = 10_000
"""Batches that may wait for the end of a replay."""


class _Replay(Enum):
    """How the next batch of a replay is handled."""

    VERIFY = auto()
    """Compare it with the batch that was applied last."""
    APPLY = auto()
    SKIP = auto()
    """Ignore the rest: another replay follows."""


class EngineFollower:
    """The events of one engine (one data-parallel rank), and the blocks that it has cached.

    ``can_replay``: whether the engine has a replay endpoint. Call ``restart`` first. While ``replay_from`` is a number, request a replay
    from there, and pass its batches to ``add_replayed`` and its end to ``end_replay``. All methods return the changes in order.
    """

    def __init__(self, *, can_replay: bool = True) -> None:
        self._can_replay = can_replay
        self.blocks = EngineBlocks()
        self.replay_from: int | None = None
        """The number of the batch from which to request a replay; None if none is needed."""
        self.is_complete = True
        """Whether nothing was stored before the first applied batch. Otherwise blocks may be cached that are not known."""
        self.gaps = 0
        """How many times batches were missing."""
        self._next = 0
        self._last: Batch | None = None
        self._hole: int | None = None
        """The missing batch for which the current replay, or the one before, was requested."""
        self._replay = _Replay.APPLY
        self._waiting: deque[tuple[int, bytes]] = deque()

    @property
    def last_number(self) -> int:
        """The number of the batch that was applied last; -1 before the first."""
        return self._next - 1

    def restart(self) -> list[Changes]:
        """Forget everything and begin with the first batch: the connection is new, or the engine has been replaced."""
        self._waiting.clear()
        self._hole = None
        changes = self._forget()
        if self._can_replay:
            self.request_replay()
        return [changes]

    def add(self, number: int, payload: bytes) -> list[Changes]:
        """Apply a published batch. Raises ValueError for an invalid batch."""
        if self.replay_from is not None:
            if len(self._waiting) < _WAITING:
                self._waiting.append((number, payload))
            return []
        batch = decode_batch(payload)
        if number < self._next and self._last is not None and batch.time <= self._last.time:
            return []  # a replay has brought it already
        if number == self._next:
            return [self._apply(number, batch)]
        self.gaps += 1
        is_new_engine = number < self._next  # it counts from 0 again
        if not self._can_replay or self._hole == self._next:  # there is no replay, or it did not have the missing batch
            return [self._forget(), self._apply(number, batch)]
        changes = [self._forget()] if is_new_engine else []
        self._hole = self._next
        self.request_replay()
        self._waiting.append((number, payload))
        return changes

    def add_replayed(self, number: int, payload: bytes) -> list[Changes]:
        """Take a batch of the replay. Raises ValueError for an invalid batch."""
        if self.replay_from is None or self._replay is _Replay.SKIP or (self._replay is _Replay.APPLY and number < self._next):
            return []
        batch = decode_batch(payload)
        changes: list[Changes] = []
        if self._replay is _Replay.VERIFY:
            self._replay = _Replay.APPLY
            if batch == self._last:
                return []
            changes.append(self._forget())
            if number == self.replay_from != 0:
                self._replay = _Replay.SKIP  # another engine, whose first batches this replay does not have
                return changes
        if self._last is not None and number > self._next:
            if self._hole != self._next:
                self._hole = self._next
                self._replay = _Replay.SKIP  # the engine's socket was full: the next replay continues here
                return changes
            changes.append(self._forget())  # no replay has it
        return [*changes, self._apply(number, batch)]

    def end_replay(self) -> list[Changes]:
        """Take the end of the replay. ``replay_from`` is None afterwards unless another replay is needed. Raises ValueError."""
        if self._replay is not _Replay.APPLY:
            # A batch that is still to be compared is missing: the engine has fewer batches, so it is another one.
            changes = [self._forget()] if self._replay is _Replay.VERIFY else []
            self.request_replay()
            return changes
        self.replay_from = None
        waiting, self._waiting = self._waiting, deque()
        return [changes for number, payload in waiting for changes in self.add(number, payload)]

    def check(self) -> None:
        """Request a replay from the last batch, which shows whether later ones were lost."""
        if self._can_replay and self.replay_from is None:
            self.request_replay()

    def _apply(self, number: int, batch: Batch) -> Changes:
        if self._last is None:
            self.is_complete = number == 0
        self._next, self._last = number + 1, batch
        return self.blocks.apply(batch.events)

    def _forget(self) -> Changes:
        self._next, self._last = 0, None
        return self.blocks.clear()

    def request_replay(self) -> None:
        """Request a replay from the batch that was applied last, or from the first one."""
        self.replay_from = max(self._next - 1, 0)
        self._replay = _Replay.APPLY if self._last is None else _Replay.VERIFY
