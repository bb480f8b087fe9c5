"""Notifications to the service manager that started the gateway, in systemd's protocol: one datagram each (sd_notify(3)).

The rules: READY is sent when /readyz reports ready. The watchdog is notified by control's event loop, and only while the parts that serve
clients work. Sending never waits, and a failure has no effect. Without a service manager nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""The variables by which the service manager configures notifications. Launched servers do not inherit them."""
_CHECK_INTERVAL = 0.25  # seconds
_STATUS_INTERVAL = 2.0
_EXTEND_INTERVAL = 10.0
_START_EXTENSION = 60.0  # seconds that each message extends the start timeout
_MICROSECONDS = 1_000_000
_log = logging.getLogger("vllm_gateway.control")


class Supervised(Protocol):
    """The state of the gateway for its service manager."""

    def not_ready(self) -> str | None:
        """Return why the gateway is not ready for traffic, or None if it is ready."""

    def broken(self) -> str | None:
        """Return what has failed and will not recover without a restart, or None."""

    def headline(self) -> str:
        """Summarize the state in one line."""


class _Phase(Enum):
    STARTING = "starting"
    RUNNING = "running"
    RELOADING = "reloading"
    STOPPING = "stopping"


class ServiceManager:
    """Notify the service manager at ``address``: a path, or ``@`` and an abstract name. None: send nothing.

    ``watchdog`` is the number of seconds in which it expects the next keep-alive message. None: it has no watchdog.
    """

    def __init__(self, address: str | None, watchdog: float | None) -> None:
        self._address = None if address is None else address.replace("@", "\0", 1) if address.startswith("@") else address
        self._watchdog = watchdog
        self._phase = _Phase.STARTING
        self._due = dict.fromkeys(("STATUS", "EXTEND_TIMEOUT_USEC", "WATCHDOG"), 0.0)
        self._status = ""
        self._has_warned = False

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int) -> ServiceManager:
        """Return the service manager of the environment. A watchdog for another process is ignored (sd_watchdog_enabled(3))."""
        address, microseconds = environ.get("NOTIFY_SOCKET", ""), environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        watchdog = int(microseconds) / _MICROSECONDS if meant and microseconds.isdecimal() else None
        return cls(address if address[:1] in ("/", "@") else None, watchdog)

    async def run(self, gateway: Supervised) -> None:
        """Notify the service manager until cancelled."""
        while self._address is not None:
            try:
                self.notify(gateway, time.monotonic())
            except Exception:  # noqa: BLE001  the outer edge: if it persists, the watchdog gets no sign of life
                _log.exception("notifying the service manager failed")
            await asyncio.sleep(_CHECK_INTERVAL)

    def notify(self, gateway: Supervised, now: float) -> None:
        """Send the notifications that are due. ``now`` is the time of the monotonic clock."""
        fields: dict[str, str] = {}
        if self._phase is _Phase.STARTING and gateway.not_ready() is None:
            fields["READY"] = "1"
        if self._is_due("STATUS", now, _STATUS_INTERVAL) and self._phase is not _Phase.STOPPING:
            headline = gateway.headline()
            fields |= {"STATUS": headline} if headline != self._status else {}
        fields |= self._signs_of_life(gateway, now)
        if self._send(fields):
            self._status = fields.get("STATUS", self._status)
            self._phase = _Phase.RUNNING if "READY" in fields else self._phase

    def _signs_of_life(self, gateway: Supervised, now: float) -> dict[str, str]:
        """Extend the start timeout while the gateway starts, because models may need long.

        Afterwards send the watchdog's keep-alive messages.
        """
        field, interval = (
            ("EXTEND_TIMEOUT_USEC", _EXTEND_INTERVAL) if self._phase is _Phase.STARTING else ("WATCHDOG", (self._watchdog or 0) / 3)
        )
        if not interval or not self._is_due(field, now, interval):
            return {}
        if self._phase is not _Phase.STOPPING and (broken := gateway.broken()) is not None:
            _log.error("the service manager is not notified any longer, so that it restarts the gateway: %s", broken)
            return {}
        return _within(_START_EXTENSION) if field == "EXTEND_TIMEOUT_USEC" else {field: "1"}

    def _is_due(self, field: str, now: float, interval: float) -> bool:
        if now < self._due[field]:
            return False
        self._due[field] = now + interval
        return True

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Notify that the configuration is being read, and its end. Before the gateway is ready, reading is a part of the start."""
        if self._phase is not _Phase.RUNNING:
            yield
            return
        self._phase = _Phase.RELOADING
        self._send({"RELOADING": "1", "MONOTONIC_USEC": str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)})
        try:
            yield
        finally:
            if self._phase is _Phase.RELOADING:
                self._phase = _Phase.RUNNING if self._send({"READY": "1"}) else _Phase.STARTING

    def stopping(self, seconds: float) -> None:
        """Notify that the gateway stops, which may take ``seconds``."""
        self._phase = _Phase.STOPPING
        self._send({"STOPPING": "1", "STATUS": "stopping"} | _within(seconds))

    def _send(self, fields: Mapping[str, str]) -> bool:
        """Send a notification. Returns whether it was sent."""
        if self._address is None or not fields:
            return True
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)
                line.sendto(text.encode(), self._address)
        except OSError as error:
            if not self._has_warned:
                _log.warning("the service manager cannot be notified: %s", error)
            self._has_warned = True
            return False
        self._has_warned = False
        return True


def _within(seconds: float) -> dict[str, str]:
    return {"EXTEND_TIMEOUT_USEC": str(int(seconds * _MICROSECONDS))}
