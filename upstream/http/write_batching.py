"""Batches the writes of a busy event loop: all bytes of one event-loop iteration are sent together at its end.

A write to a sleeping process wakes it, and under load the wake-up costs more than the write. A worker that wrote immediately would wake its
clients and servers for every event and request. With batching they wake once for each iteration (docs/performance.md). If an iteration has
bytes for one connection only, there is nothing to batch, and the reader can work while the worker does its accounting. So there are two
modes:

| mode | a write | changes to the other mode |
|---|---|---|
| immediate | is sent at once | if an iteration has several writes; only every ``_SAMPLED``-th write looks for others |
| batching | is sent at the end of the iteration | after ``max_single_flushes`` iterations in a row with bytes for one connection |

Owns the buffered bytes. The rules: the order of writes does not change, apart from those of ``write_at_once``, and bytes wait at most until
the end of the iteration. Close and abort send the buffered bytes first. A very busy iteration sends in several batches.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

_SMALL = 64 * 1024
"""Bytes that are appended to the buffered ones. Larger writes are sent without a copy."""
_MOST_PENDING = 32
"""Transports with buffered bytes that do not wait for the end of the iteration: the first of them would wait for too long."""
_SAMPLED = 8
"""Immediate writes for each one whose iteration is examined."""


class WriteBatch:
    """The transports with buffered bytes, and the mode of the running loop. ``batching``: whether writes are buffered."""

    __slots__ = ("_immediate_writes", "_max_single_flushes", "_single_flushes", "batching", "pending")

    def __init__(self, max_single_flushes: float = 8.0) -> None:
        self.pending: list[BatchingTransport] = []
        self._max_single_flushes = max_single_flushes
        self.batching = False
        self._immediate_writes = 0
        self._single_flushes = 0

    def schedule_flush(self) -> None:
        """Schedule ``flush`` for the end of this event-loop iteration."""
        asyncio.get_running_loop().call_soon(self.flush)

    def count_immediate_write(self) -> None:
        """Count a write that was sent at once."""
        self._immediate_writes += 1
        if self._immediate_writes == _SAMPLED:
            asyncio.get_running_loop().call_soon(self._finish_sample)

    def _finish_sample(self) -> None:
        """End the iteration of the sampled write. If more was written in it, the loop is busy."""
        if self._immediate_writes > _SAMPLED:
            self.batching, self._single_flushes = True, 0
        self._immediate_writes = 0

    def flush(self) -> None:
        """Send all buffered bytes."""
        transports, self.pending = self.pending, []
        if not transports:
            return
        self._single_flushes = self._single_flushes + 1 if len(transports) == 1 else 0
        self.batching = self._single_flushes < self._max_single_flushes
        transport: BatchingTransport
        for transport in transports:
            data = transport.buffered
            if data is not None:
                transport.buffered = None
                transport.send(data)


class BatchingTransport:
    """A transport that buffers its writes until the end of the event-loop iteration. Its protocol must call ``mark_closed``."""

    __slots__ = ("_transport", "_write_batch", "buffered", "send")

    def __init__(self, transport: asyncio.Transport, write_batch: WriteBatch) -> None:
        self._transport = transport
        self._write_batch = write_batch
        self.buffered: bytes | None = None
        self.send: Callable[[bytes], None] = transport.write

    def write(self, data: Any) -> None:
        batch = self._write_batch
        if self.buffered is not None:
            if len(data) < _SMALL:
                self.buffered += data
            else:
                self.flush()
                self.send(data)
        elif batch.batching:
            self.buffered, pending = data, batch.pending
            if not pending:
                batch.schedule_flush()
            pending.append(self)
            if len(pending) >= _MOST_PENDING:
                batch.flush()
        else:
            self.send(data)
            batch.count_immediate_write()

    def write_at_once(self, data: bytes) -> None:
        """Write without waiting for the end of the iteration: the first byte of a stream is awaited at the other end."""
        if self.buffered is not None:
            data, self.buffered = self.buffered + data, None
        self.send(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def flush(self) -> None:
        """Send the buffered bytes of all transports, because those of a leading transport come first."""
        if self.buffered is not None:
            self._write_batch.flush()

    def mark_closed(self) -> None:
        """Drop the buffered and all later bytes: the connection is closed."""
        self.buffered, self.send = None, _drop

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self.buffered or b"")

    # Passed to the transport unchanged

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


class LeadingTransport(BatchingTransport):
    """A batching transport whose bytes are sent before those of all other transports of the iteration.

    uvloop sends what was written to several transports in any order. So the bytes are written to the socket here. Only what the socket
    does not take, and the bytes of a TLS connection, are left to the event loop.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, transport: asyncio.Transport, write_batch: WriteBatch) -> None:
        super().__init__(transport, write_batch)
        sock, has_tls = transport.get_extra_info("socket"), transport.get_extra_info("sslcontext") is not None
        self._descriptor: int | None = None if sock is None or has_tls else sock.fileno()
        self.send = self._send_directly

    def write(self, data: Any) -> None:
        batch = self._write_batch
        if self.buffered is not None or not batch.batching:
            super().write(data)
            return
        if not batch.pending:
            batch.schedule_flush()
        self.buffered = data
        batch.pending.insert(0, self)

    def _send_directly(self, data: bytes) -> None:
        transport, sent = self._transport, 0
        if self._descriptor is not None and not transport.is_closing() and not transport.get_write_buffer_size():
            with suppress(OSError):  # the socket's buffer is full, or the connection is lost, which the event loop will find
                sent = os.write(self._descriptor, data)
        if sent < len(data):
            transport.write(data[sent:])


def _drop(data: bytes) -> None:
    """Do nothing with bytes for a closed connection."""
