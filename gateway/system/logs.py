"""What the gateway's processes say on standard error: lines for people or JSON for machines.

The rules: libraries are heard from a warning up, whatever level is set, because what they say at debug level may hold a request;
of an error only its kind and its places are written, because its words may; and a kind of line that comes again and again is
written a few times, then counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from traceback import StackSummary, walk_tb
from types import MappingProxyType
from typing import Any, TextIO

BURST = 10
"""Lines of one kind that are written within a window."""
WINDOW = 5.0
"""Seconds."""
_KINDS = 1000  # what is remembered; ours are few, a library may make up many
_CHAIN = 5  # errors behind an error that are shown
_MEMBERS = ("request_id", "model", "server", "cause")

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "control": "vllm_gateway.control",
        "worker": "vllm_gateway.worker",
        "exchange": "vllm_gateway.exchange",
        "fleet": "vllm_gateway.fleet",
        "tracing": "vllm_gateway.tracing",
        "limits": "vllm_gateway.limits",
        "ledger": "vllm_gateway.ledger",
        "certificate": "vllm_gateway.certificate",
        "launcher": "upstream.launcher",
        "health": "upstream.vllm.health",
        "discovery": "upstream.discovery",
    }
)
"""The parts that can have a level of their own, and the loggers under which they speak."""

_log = logging.getLogger("vllm_gateway")
OURS = ("vllm_gateway", "upstream")
_QUIETER = {"python_multipart": logging.ERROR}  # it warns of each bad form, and strangers can send many


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How much is said, and in which form; a part that is not in ``levels`` has the ``level`` of all."""

    level: str = "info"
    format: str = "text"
    levels: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Kind:
    """What one kind of line has had in its window."""

    since: float
    written: int = 0
    counted: int = 0


class Repeats:
    """Decides, for each line, whether it is written: pure but for what it remembers."""

    def __init__(self, burst: int = BURST, window: float = WINDOW) -> None:
        self._burst = burst
        self._window = window
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def admits(self, name: str, level: int, message: str, now: float) -> bool:
        """Whether a line is written; one that is not is counted. ``message`` is without what is filled in."""
        kind = self._kinds.get((name, level, message))
        if kind is None:
            if len(self._kinds) >= _KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            kind = self._kinds[name, level, message] = _Kind(now)
        kind.written += 1
        if kind.written <= self._burst:
            return True
        kind.counted += 1
        return False

    def over(self, now: float) -> Iterator[tuple[str, int, str, int]]:
        """Forget the kinds whose window is over, and tell those of which lines were left out: name, level, message, how many."""
        for key in [key for key, kind in self._kinds.items() if now - kind.since >= self._window]:
            counted = self._kinds.pop(key).counted
            if counted:
                yield (*key, counted)


class Handler(logging.StreamHandler[TextIO]):
    """Writes what is not too much; of the rest the number, with the next line or the next ``tell``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self.tell(now)
        if self._repeats.admits(record.name, record.levelno, str(record.msg), now):
            super().emit(record)

    def tell(self, now: float) -> None:
        """Say how many lines were left out of the kinds whose window is over."""
        self.acquire()
        try:
            for name, level, message, count in self._repeats.over(now):
                told = logging.LogRecord(name, level, "", 0, f"{count} more lines like this: {message}", None, None)
                told.suppressed = count
                super().emit(told)
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  as logging has it
        """Nobody reads standard error any more, or its disk is full: serving goes on."""


class TextFormatter(logging.Formatter):
    """``2027-01-01T12:00:00.000Z WARNING control: words``, with the trace below."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = f"{timestamp(record.created)} {record.levelname} {self._process}: {record.getMessage()}"
        return "\n".join([line, *_trace(record)])


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, process, part, message, and what the line is about."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "part": part_of(record.name),
            "message": record.getMessage(),
        }
        line |= {name: value for name in (*_MEMBERS, "suppressed") if (value := getattr(record, name, None)) is not None}
        if trace := list(_trace(record)):
            line["trace"] = "\n".join(trace)
        return json.dumps(line, ensure_ascii=False)


def timestamp(moment: float) -> str:
    """Seconds since the epoch as RFC 3339, in UTC, with milliseconds."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def part_of(logger: str) -> str:
    """The part that speaks under a logger's name; a library speaks under its own."""
    return next((part for part, name in PARTS.items() if logger == name or logger.startswith(name + ".")), logger)


def _trace(record: logging.LogRecord) -> Iterator[str]:
    """Where an error came from, and of what kind it and those behind it are."""
    error = record.exc_info[1] if record.exc_info else None
    for _ in range(_CHAIN):
        if error is None:
            return
        yield f"{type(error).__module__}.{type(error).__qualname__}{_words(error)}, from"
        yield from "".join(StackSummary.extract(walk_tb(error.__traceback__)).format()).splitlines()
        error = error.__cause__ or error.__context__


def _words(error: BaseException) -> str:
    """What the system says of its own errors holds nothing of a request."""
    return f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""


_FORMATTERS: Mapping[str, type[TextFormatter | JsonFormatter]] = MappingProxyType({"text": TextFormatter, "json": JsonFormatter})


def uncaught(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A loop's exception handler; asyncio's own words hold what an error says, and the callback's arguments."""
    error = context.get("exception")
    _log.error("%s", "an error that nobody caught" if error is not None else context["message"], exc_info=error)


def _handler() -> Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, Handler)), None)


def for_programs() -> bool:
    """Whether what is said is JSON."""
    handler = _handler()
    return handler is not None and isinstance(handler.formatter, JsonFormatter)


def tell(now: float) -> None:
    """Say how many lines were left out, where that is due; called about once a second."""
    handler = _handler()
    if handler is not None:
        handler.tell(now)


def configure(settings: LogSettings, process: str) -> None:
    """Have everything said from now on by these settings; may be called again. ``process`` is as in ``worker 0``."""
    root, handler = logging.getLogger(), _handler()
    if handler is None:
        handler = Handler(sys.stderr)
        root.addHandler(handler)
    handler.setFormatter(_FORMATTERS[settings.format](process))
    root.setLevel(logging.WARNING)
    levels = dict.fromkeys(OURS, settings.level) | {name: settings.levels.get(part) for part, name in PARTS.items()}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level.upper() if level else logging.NOTSET)
    for name, quieter in _QUIETER.items():
        logging.getLogger(name).setLevel(quieter)
