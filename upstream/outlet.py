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


class Turn:
    """The outlets that have something to send when the present turn of the running loop ends.

    ``gathers``: whether writes wait for that. It follows from what the turns before had to send; ``patience``: after so many in a
    row that had one outlet to flush the loop is not busy any more.
    """

    __slots__ = ("_alone", "_patience", "at_once", "gathers", "outlets")

    def __init__(self, patience: float = 8) -> None:
        self.outlets: list[Outlet] = []
        self._patience = patience
        self.gathers = False
        self.at_once = 0
        self._alone = 0

    def begin(self) -> None:
        """Have ``end`` called when what came in this turn has been handled."""
        asyncio.get_running_loop().call_soon(self.end)

    def sample(self) -> None:
        """See whether more is written in this turn than what has just been."""
        self.at_once = _SAMPLED + 1  # so that what follows is counted, and starts no sample
        asyncio.get_running_loop().call_soon(self._sampled)

    def _sampled(self) -> None:
        if self.at_once > _SAMPLED + 1:
            self.gathers, self._alone = True, 0
        self.at_once = 0

    def end(self) -> None:
        """Send everything."""
        outlets, self.outlets = self.outlets, []
        self._alone = self._alone + 1 if len(outlets) == 1 else 0
        self.gathers = self._alone < self._patience
        for outlet in outlets:
            data = outlet.waiting
            if data is not None:
                outlet.waiting = None
                outlet.send(data)


class Outlet(asyncio.Transport):
    """A transport whose writes wait for the end of the turn. Its protocol has to tell it of the connection's loss."""

    __slots__ = ("_transport", "_turn", "send", "waiting")

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        super().__init__()
        self._transport = transport
        self._turn = turn
        self.waiting: bytes | None = None
        self.send: Callable[[bytes], None] = transport.write

    def write(self, data: Any) -> None:
        if self.waiting is None:
            turn = self._turn
            if turn.gathers:
                self.waiting = data
                if not turn.outlets:
                    turn.begin()
                turn.outlets.append(self)
            else:
                self.send(data)
                turn.at_once += 1
                if turn.at_once == _SAMPLED:
                    turn.sample()
        elif len(data) < _SMALL:
            self.waiting += data
        else:
            self.flush()
            self.send(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def flush(self) -> None:
        """Send what waits."""
        data, self.waiting = self.waiting, None
        if data is not None:
            self.send(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def lost(self) -> None:
        """The connection is gone, and the transport takes nothing any more."""
        self.waiting, self.send = None, _drop

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self.waiting or b"")

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
