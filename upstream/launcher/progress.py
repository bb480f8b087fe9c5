"""What a server that is starting is busy with: one line out of what it writes. Pure.

The rule: a line is shown as the server wrote it, without the process, the level, the time and the place in the source
that vLLM puts before it; what tells of no progress (warnings, continuations, its banner) is passed over.
"""

from __future__ import annotations

import re

MOST = 160
"""Characters of a line that are shown."""

_PROCESS = re.compile(r"\(\w[\w ./-]* pid=\d+\) ?")
_HEAD = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] ?")
_WARNING = re.compile(r"\[?W\d{4} |.*Warning: ")
"""PyTorch's warnings, and those of Python's warnings module."""


def progress(text: str) -> str:
    """The last line of a log that says something; empty where there is none. A bar that is drawn anew with returns is its last state."""
    return next((said[:MOST] for line in reversed(text.splitlines()) if (said := _said(line))), "")


def _said(line: str) -> str:
    line = _PROCESS.sub("", line, count=1)
    head = _HEAD.match(line)
    if head is not None:
        line = line[head.end() :]
    silent = (head is not None and head["level"] in ("DEBUG", "WARNING")) or line[:1].isspace() or _WARNING.match(line)
    return line.rstrip() if not silent and any(map(str.isalnum, line)) else ""
