"""The log of a launched server: everything that it writes, appended to one file.

Owns the file, its limit, its tail and the progress that it shows. The server writes to the file itself: there is no pipe that could fill up
or close with control. The rule: every reader reads a bounded part, and text for terminals is printable.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from upstream.launcher.progress import progress

LIMIT = 64 << 20
"""Bytes at which the log is truncated. Its end is stored beside it, as ``….log.1``."""
ROTATED = 4 << 20
TAIL_BYTES = 8192
TAIL_LINES = 20
SEARCHED_BYTES = 512 << 10
"""Bytes at the end of the log that are searched for the cause of a failure. The tracebacks of a dozen processes need a tenth of that."""
RECENT = 60
"""Number of ``rotate`` calls for which output counts as recent."""
_PROBE = re.compile(r'"GET /(?:health|metrics|load|version|is_sleeping|v1/models) HTTP/1\.1" 200')
"""Lines of vLLM's access log about what the gateway reads regularly."""
_OWN = os.O_NOFOLLOW | os.O_CLOEXEC  # never follow the link of another user


class LogFile:
    """The log of the server ``name`` in ``folder``, which exists and is private."""

    def __init__(self, folder: Path, name: str, limit: int = LIMIT) -> None:
        # Quoting, unlike replacing characters, gives each name a separate file.
        self.path = folder / f"{quote(name, safe='#@+=,')}.log"
        self._limit = limit
        self._start = 0
        self._sizes: deque[int] = deque(maxlen=RECENT)

    @contextmanager
    def appending(self) -> Iterator[int]:
        """Yield a file descriptor to append to, for a new process.

        The other methods then read the output of this process. Raises OSError.
        """
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _OWN, 0o600)
        try:
            self._start = os.fstat(fd).st_size
            self._sizes.clear()
            yield fd
        finally:
            os.close(fd)

    def tail(self) -> str:
        """Return the last lines of the current process without the gateway's own probes, at most TAIL_LINES and TAIL_BYTES."""
        lines: list[str] = []
        for most in (TAIL_BYTES, SEARCHED_BYTES):  # a server without requests has written hardly anything but probes
            lines = [line for line in _printable(self._text(most)).splitlines() if not _PROBE.search(line)]
            if len(lines) >= TAIL_LINES:
                break
        return "\n".join(lines[-TAIL_LINES:])[-TAIL_BYTES:]

    def progress(self) -> str:
        """Return the last line of the current process that shows progress, or an empty text."""
        return _printable(progress(self._text()))

    def text(self, *, recent: bool = False) -> str:
        """Return the output of the current process, at most the last SEARCHED_BYTES; with ``recent`` since RECENT calls of ``rotate``."""
        return self._text(SEARCHED_BYTES, since=self._sizes[0] if recent and self._sizes else 0)

    def rotate(self) -> None:
        """Truncate the log if it exceeds its limit, and store its end. Called regularly. Raises OSError.

        Truncation in place works because the server appends: its next line is written at the new end.
        """
        self._sizes.append(size := self.path.lstat().st_size)
        if size > self._limit:
            end = self._end(min(ROTATED, self._limit))
            with open(self.path.with_suffix(".log.1"), "wb", opener=_own) as older:
                older.write(end)
            with open(self.path, "r+b", opener=_own) as present:
                present.truncate(0)
            self._start = 0
            self._sizes.clear()

    def _text(self, most: int = TAIL_BYTES, since: int = 0) -> str:
        try:
            return self._end(most, since).decode(errors="replace")
        except OSError:
            return ""

    def _end(self, most: int, since: int = 0) -> bytes:
        with open(self.path, "rb", opener=_own) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, since, size - most))
            return file.read(most)


def _own(path: str, flags: int) -> int:
    """Open the gateway's own file. It is an opener because ``open`` closes the descriptor even if it is a folder."""
    return os.open(path, flags | _OWN, 0o600)


def _printable(text: str) -> str:
    return "".join(char for char in text.strip() if char.isprintable() or char in "\n\t")
