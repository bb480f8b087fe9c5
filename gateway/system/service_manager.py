"""What the service manager that started the gateway hears of it: systemd's notifications, one datagram each (sd_notify(3)).

The rules: nothing is said that is not so (ready is what /readyz says); the watchdog is fed by control's own loop, and only while what
serves clients works; telling never waits and hurts nobody; where no service manager asks, nothing is said.
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
"""What the service manager says by the environment. It is for the gateway alone: servers that are launched do not inherit it."""
_LOOK_EVERY = 0.25  # seconds
_STATUS_EVERY = 2.0
_ASK_EVERY = 10.0
_STARTING_TAKES = 60.0  # seconds: what each word of a start that goes on asks for
_MICROSECONDS = 1_000_000
_log = logging.getLogger("vllm_gateway.control")


class Supervised(Protocol):
    """The gateway, as its service manager is told of it."""

    def not_ready(self) -> str | None:
        """Why no traffic should come yet; None when it may."""

    def broken(self) -> str | None:
        """What has stopped working and will not work again by itself; None while all is well."""

    def headline(self) -> str:
        """How it is, in a line."""


class _Phase(Enum):
    STARTING = "starting"
    RUNNING = "running"
    RELOADING = "reloading"
    STOPPING = "stopping"


class ServiceManager:
    """Tells the service manager at ``address`` (a path, or ``@`` and an abstract name; None: nobody).

    ``patience``: within so many seconds it wants to hear again and again that the gateway works; None: it does not care.
    """

    def __init__(self, address: str | None, patience: float | None) -> None:
        self._address = None if address is None else address.replace("@", "\0", 1) if address.startswith("@") else address
        self._patience = patience
        self._phase = _Phase.STARTING
        self._due = dict.fromkeys(("STATUS", "EXTEND_TIMEOUT_USEC", "WATCHDOG"), 0.0)
        self._status = ""
        self._complained = False

    @classmethod
    def of(cls, environ: Mapping[str, str], pid: int) -> ServiceManager:
        """The one that the environment names; the watchdog counts only where it is meant for this process (sd_watchdog_enabled(3))."""
        address, microseconds = environ.get("NOTIFY_SOCKET", ""), environ.get("WATCHDOG_USEC", "")
        meant = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        patience = int(microseconds) / _MICROSECONDS if meant and microseconds.isdecimal() else None
        return cls(address if address[:1] in ("/", "@") else None, patience)

    async def run(self, gateway: Supervised) -> None:
        """Tell of the gateway until cancelled."""
        while self._address is not None:
            try:
                self.look(gateway, time.monotonic())
            except Exception:  # noqa: BLE001  the outer edge: where it goes on like this, the watchdog hears nothing
                _log.exception("a look for the service manager")
            await asyncio.sleep(_LOOK_EVERY)

    def look(self, gateway: Supervised, now: float) -> None:
        """Say what is to be said at this moment of the monotonic clock."""
        words: dict[str, str] = {}
        if self._phase is _Phase.STARTING and gateway.not_ready() is None:
            words["READY"] = "1"
        if self._is_due("STATUS", now, _STATUS_EVERY) and self._phase is not _Phase.STOPPING:
            words |= self._news(gateway.headline())
        words |= self._signs_of_life(gateway, now)
        if self._say(words):
            self._status = words.get("STATUS", self._status)
            self._phase = _Phase.RUNNING if "READY" in words else self._phase

    def _news(self, headline: str) -> dict[str, str]:
        return {"STATUS": headline} if headline != self._status else {}

    def _signs_of_life(self, gateway: Supervised, now: float) -> dict[str, str]:
        """A start may last as long as it goes on, since models take their time; afterwards there is the watchdog."""
        word, every = ("EXTEND_TIMEOUT_USEC", _ASK_EVERY) if self._phase is _Phase.STARTING else ("WATCHDOG", (self._patience or 0) / 3)
        if not every or not self._is_due(word, now, every):
            return {}
        if self._phase is not _Phase.STOPPING and (broken := gateway.broken()) is not None:
            _log.error("the service manager hears no more from here, so that it starts the gateway anew: %s", broken)
            return {}
        return _within(_STARTING_TAKES) if word == "EXTEND_TIMEOUT_USEC" else {word: "1"}

    def _is_due(self, word: str, now: float, every: float) -> bool:
        if now < self._due[word]:
            return False
        self._due[word] = now + every
        return True

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Say that the configuration is being read, and when that is over. Before the gateway is ready, that is a part of its start."""
        if self._phase is not _Phase.RUNNING:
            yield
            return
        self._phase = _Phase.RELOADING
        self._say({"RELOADING": "1", "MONOTONIC_USEC": str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)})
        try:
            yield
        finally:
            if self._phase is _Phase.RELOADING:
                self._phase = _Phase.RUNNING if self._say({"READY": "1"}) else _Phase.STARTING

    def stopping(self, seconds: float) -> None:
        """Say that the end has begun, and that it may take so long."""
        self._phase = _Phase.STOPPING
        self._say({"STOPPING": "1", "STATUS": "stopping"} | _within(seconds))

    def _say(self, words: Mapping[str, str]) -> bool:
        """Returns whether it was heard; whatever was not is said again where that matters."""
        if self._address is None or not words:
            return True
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in words.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.setblocking(False)
                line.sendto(text.encode(), self._address)
        except OSError as error:
            if not self._complained:
                _log.warning("the service manager cannot be told: %s", error)
            self._complained = True
            return False
        self._complained = False
        return True


def _within(seconds: float) -> dict[str, str]:
    return {"EXTEND_TIMEOUT_USEC": str(int(seconds * _MICROSECONDS))}
