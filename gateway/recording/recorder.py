"""Record the selected requests of a worker: decide, collect, and hand over to the writer's thread.

The rules: a request never waits for its record and never fails because of it. The memory of all captures is bounded. A record that cannot
be kept is dropped, and each selected request is counted once by its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.recording.capture import Capture, Memory, SentBody
from gateway.recording.selection import Selection
from gateway.snapshot.snapshot import Recording

if TYPE_CHECKING:
    from gateway.recording.writer import Writer

MEMORY_LIMIT = 64 * 1024 * 1024
"""Bytes of the records of one worker that have not been stored yet."""

HEADER = b"x-vllm-gateway-recorded: true\r\n"
"""The header line of the response to a recorded request."""


class BodyRecorder:
    """The records of a worker. ``count`` counts a selected request by its result. ``deletes``: this worker deletes expired records."""

    def __init__(self, count: Callable[[str], None], *, deletes: bool) -> None:
        self._count = count
        self._deletes = deletes
        self._settings: Recording | None = None
        self._writer: Writer | None = None
        self._closing: list[Writer] = []
        """Writers of earlier settings that still store what was added to them."""
        self._memory = Memory(MEMORY_LIMIT)
        self.selection: Selection | None = None
        """Decides which requests are recorded; None if recording is off."""

    def apply_settings(self, settings: Recording | None) -> None:
        """Record by these settings from now on. Requests in flight are stored in the new store."""
        if settings == self._settings:
            return
        self._settings, self.selection = settings, None
        if self._writer is not None:
            self._writer.close()
            self._closing.append(self._writer)
            self._writer = None
        if settings is not None:
            from gateway.recording.writer import Writer  # with the store's library

            self.selection = Selection(settings)
            self._writer = Writer(settings, deletes=self._deletes)

    def start(self, path: str, received_at: float, body: bytes | bytearray, sent: SentBody, sent_size: int) -> Capture | None:
        """Start to record a request; None if there is no memory for it. ``sent_size``: bytes of its serialized body, if it is stored."""
        capture = Capture(path, received_at, body, sent, self._memory, self._count, self._finish)
        return capture if capture.hold(len(body) + sent_size) else None

    def _finish(self, capture: Capture) -> None:
        if self._writer is None:  # recording has been turned off
            self._settled(capture, "stopped")
        else:
            self._writer.add(capture)

    def _settled(self, capture: Capture, result: str) -> None:
        self._memory.release(capture.size)
        self._count(result)

    def tick(self) -> None:
        """Count the records that were stored or dropped, a few times a second."""
        if self._writer is not None:
            self._writer.collect(self._settled)
        if self._closing:
            ended = [writer for writer in self._closing if not writer.is_running]  # before the last results are collected
            for writer in self._closing:
                writer.collect(self._settled)
            self._closing = [writer for writer in self._closing if writer not in ended]

    def close(self) -> None:
        """Store what is complete, for a few seconds at most."""
        self.apply_settings(None)
        for writer in self._closing:
            writer.join()
        self.tick()
