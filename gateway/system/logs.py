"""The log of the gateway's processes on standard error: text lines or JSON lines.

The rules: libraries log warnings and errors only, at every configured level, because their debug messages may contain a request. Only the
type and the stack of an exception are written, because its message may contain a request. A repeated line is written a few times, then
counted. A record begins one line, and no text in it can begin another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from traceback import StackSummary, walk_tb
from typing import Any, TextIO

BURST = 10
"""Lines of one kind that are written in a window."""
WINDOW = 5.0
"""Seconds."""
_KINDS = 1000  # remembered kinds; the gateway has few, but a library may format its own messages
_CHAIN = 5  # causes of an error that are shown
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_FIELDS = ("request_id", "model", "server", "cause")

_OF_UPSTREAM = {"launcher": "upstream.launcher", "health": "upstream.vllm.health", "discovery": "upstream.discovery"}
_OF_GATEWAY = ("control", "worker", "exchange", "fleet", "tracing", "limits", "ledger", "audit", "certificate", *_OF_UPSTREAM, "kv_events")
PARTS: Mapping[str, str] = {part: _OF_UPSTREAM.get(part, f"vllm_gateway.{part}") for part in _OF_GATEWAY}
"""The parts whose level can be set, and their loggers."""

_log = logging.getLogger("vllm_gateway")
OURS = ("vllm_gateway", "upstream")
_QUIETER = {"python_multipart": logging.ERROR}  # it warns of each invalid form, and unauthenticated clients can send many


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of the log. A part that is not in ``levels`` has the general ``level``."""

    level: str = "info"
    format: str = "text"
    levels: Mapping[str, str] = field(default_factory=dict)


class Repeats:
    """Decides which lines are written."""

    def __init__(self, burst: int = BURST, window: float = WINDOW) -> None:
        self._burst = burst
        self._window = window
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}  # when the window of each kind began, and its lines

    def admits(self, name: str, level: int, message: str, now: float) -> bool:
        """Count a line, and return whether it is written. ``message`` is the format string."""
        kind = name, level, message
        if kind not in self._kinds and len(self._kinds) >= _KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        since, lines = self._kinds.get(kind, (now, 0))
        self._kinds[kind] = since, lines + 1
        return lines < self._burst

    def expired(self, now: float) -> Iterator[tuple[str, int, str, int]]:
        """Forget kinds whose window has expired. Yields logger, level, message and number of suppressed lines."""
        for kind, (since, lines) in tuple(self._kinds.items()):
            if now - since >= self._window:
                del self._kinds[kind]
                if lines > self._burst:
                    yield (*kind, lines - self._burst)


class Handler(logging.StreamHandler[TextIO]):
    """Writes lines, and the number of suppressed repeats with the next line or the next ``report_suppressed``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self.report_suppressed(now)
        if self._repeats.admits(record.name, record.levelno, str(record.msg), now):
            super().emit(record)

    def report_suppressed(self, now: float) -> None:
        """Write how many lines were suppressed in expired windows."""
        self.acquire()
        try:
            for name, level, message, count in self._repeats.expired(now):
                summary = logging.LogRecord(name, level, "", 0, f"{count} more lines like this: {message}", None, None)
                summary.suppressed = count
                super().emit(summary)
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  as in logging
        """Ignore a closed standard error or a full disk. The gateway continues to serve requests."""


class TextFormatter(logging.Formatter):
    """Formats ``2027-01-01T12:00:00.000Z WARNING control: message``, followed by the trace."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = f"{timestamp(record.created)} {record.levelname} {self._process}: {_of_one_record(record.getMessage())}"
        return "\n".join([line, *_trace(record)])


class JsonFormatter(TextFormatter):
    """Formats one object per line: time, level, process, part, message, and fields such as ``model``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "part": part_of(record.name),
            "message": record.getMessage(),
        }
        line |= {name: value for name in (*_FIELDS, "suppressed") if (value := getattr(record, name, None)) is not None}
        if trace := list(_trace(record)):
            line["trace"] = "\n".join(trace)
        return json.dumps(line, ensure_ascii=False)


def _of_one_record(message: str) -> str:
    """Return a message whose further lines are indented, with control characters escaped: a part of it may come from a client."""
    if message.isprintable():
        return message
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message).replace("\n", "\n  ")


def timestamp(moment: float) -> str:
    """Return seconds since the epoch as RFC 3339, in UTC, with milliseconds."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def part_of(logger: str) -> str:
    """Return the part of a logger. For a library it is the logger's name."""
    return next((part for part, name in PARTS.items() if logger == name or logger.startswith(name + ".")), logger)


def _trace(record: logging.LogRecord) -> Iterator[str]:
    """Yield the types and stacks of an error and its causes."""
    error = record.exc_info[1] if record.exc_info else None
    for _ in range(_CHAIN):
        if error is None:
            return
        yield f"{type(error).__module__}.{type(error).__qualname__}{_system_message(error)}, from"
        yield from "".join(StackSummary.extract(walk_tb(error.__traceback__)).format()).splitlines()
        error = error.__cause__ or error.__context__


def _system_message(error: BaseException) -> str:
    """Return the system's message of an OSError, which never contains a part of a request."""
    return f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""


_FORMATTERS: Mapping[str, type[TextFormatter]] = {"text": TextFormatter, "json": JsonFormatter}


def uncaught(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle exceptions of an event loop. asyncio's own messages contain the error's message and the callback's arguments."""
    error = context.get("exception")
    _log.error("%s", "uncaught error" if error is not None else context["message"], exc_info=error)


def _handler() -> Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, Handler)), None)


def for_programs() -> bool:
    """Return whether the log is JSON."""
    handler = _handler()
    return handler is not None and isinstance(handler.formatter, JsonFormatter)


def report_suppressed(now: float) -> None:
    """Write how many lines were suppressed in expired windows. To be called about once a second."""
    if (handler := _handler()) is not None:
        handler.report_suppressed(now)


def configure(settings: LogSettings, process: str) -> None:
    """Configure the log of this process. May be called again. ``process`` is a name such as ``worker 0``."""
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
