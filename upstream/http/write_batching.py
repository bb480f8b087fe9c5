"""What is written in one turn of a busy loop goes out at the turn's end, all of it together.

A write to a process that sleeps wakes it, and under load the waking costs more than the writing: a worker that wrote at once
woke its clients and its servers anew for each event and each request, and they were asleep again before the next. Written in
one go, what the turn has for them costs one waking (docs/performance.md). Where turns have one thing to send there is nothing
to gather, and a reader woken at once reads while the worker does its books: such a loop writes at once. Owns what waits.
The rule: the order stays, and nothing waits for longer than the turn; who closes or aborts sends first what was written before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

_SMALL = 64 * 1024
"""Bytes that are put behind what waits already; more is sent without being copied."""
_SAMPLED = 8
"""Writes at once until the next turn in which it is seen whether more are written."""


class WriteBatch:
    """The outlets that have something to send when the present turn of the running loop ends.

    ``batching``: whether writes wait for that. It follows from what the turns before had to send; ``patience``: after so many in a
    row that had one outlet to flush the loop is not busy any more.
    """

    __slots__ = ("_max_single_flushes", "_single_flushes", "batching", "immediate_writes", "pending")

    def __init__(self, patience: float = 8) -> None:
        self.pending: list[BatchingTransport] = []
        self._max_single_flushes = patience
        self.batching = False
        self.immediate_writes = 0
        self._single_flushes = 0

    def schedule_flush(self) -> None:
        """Have ``flush`` called when what came in this turn has been handled."""
        asyncio.get_running_loop().call_soon(self.flush)

    def start_sample(self) -> None:
        """See whether more is written in this turn than what has just been."""
        self.immediate_writes = _SAMPLED + 1  # so that what follows is counted, and starts no sample
        asyncio.get_running_loop().call_soon(self._finish_sample)

    def _finish_sample(self) -> None:
        if self.immediate_writes > _SAMPLED + 1:
            self.batching, self._single_flushes = True, 0
        self.immediate_writes = 0

    def flush(self) -> None:
        """Send everything."""
        outlets, self.pending = self.pending, []
        self._single_flushes = self._single_flushes + 1 if len(outlets) == 1 else 0
        self.batching = self._single_flushes < self._max_single_flushes
        for outlet in outlets:
            data = outlet.buffered
            if data is not None:
                outlet.buffered = None
                outlet.send(data)


class BatchingTransport(asyncio.Transport):
    """A transport whose writes wait for the end of the turn. Its protocol has to tell it of the connection's loss."""

    __slots__ = ("_transport", "_write_batch", "buffered", "send")

    def __init__(self, transport: asyncio.Transport, write_batch: WriteBatch) -> None:
        super().__init__()
        self._transport = transport
        self._write_batch = write_batch
        self.buffered: bytes | None = None
        self.send: Callable[[bytes], None] = transport.write

    def write(self, data: Any) -> None:
        if self.buffered is None:
            batch = self._write_batch
            if batch.batching:
                self.buffered = data
                if not batch.pending:
                    batch.schedule_flush()
                batch.pending.append(self)
            else:
                self.send(data)
                batch.immediate_writes += 1
                if batch.immediate_writes == _SAMPLED:
                    batch.start_sample()
        elif len(data) < _SMALL:
            self.buffered += data
        else:
            self.flush()
            self.send(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def flush(self) -> None:
        """Send what waits."""
        data, self.buffered = self.buffered, None
        if data is not None:
            self.send(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def mark_closed(self) -> None:
        """The connection is gone, and the transport takes nothing any more."""
        self.buffered, self.send = None, _drop

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self.buffered or b"")

    # As the transport has it

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


def _drop(data: bytes) -> None:
    """Nobody is there to get it."""
