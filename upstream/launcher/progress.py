"""Find the log line that shows what a starting server is doing. Pure.

The rule: a line is shown as the server wrote it, without vLLM's prefix (process, level, time, position in the source). Lines without
progress (warnings, continuations, the banner) are skipped.
"""

from __future__ import annotations

import re

MAX_LENGTH = 160
"""Maximum characters of a shown line."""

_PROCESS = re.compile(r"\(\w[\w ./-]* pid=\d+\) ?")
_PREFIX = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?")
_WARNING = re.compile(r"\[?W\d{4} |.*Warning: ")
"""Warnings of PyTorch and of Python's warnings module."""


def progress(text: str) -> str:
    """Return the last line of a log that shows progress, or an empty text. Only the last state of a progress bar is used."""
    return next((message[:MAX_LENGTH] for line in reversed(text.splitlines()) if (message := _message(line))), "")


def _message(line: str) -> str:
    line = _PROCESS.sub("", line, count=1)
    if (prefix := _PREFIX.match(line)) is not None:
        line = line[prefix.end() :]
    silent = (prefix is not None and prefix["level"] in ("DEBUG", "WARNING")) or line[:1].isspace() or _WARNING.match(line)
    return line.rstrip() if not silent and any(map(str.isalnum, line)) else ""
