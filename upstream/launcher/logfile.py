"""A launched server's log: everything it writes, appended to one file.

Owns the file, its bound, its tail and what it tells of progress. The server writes to the file itself (no pipe that could fill up or die
with control). The rule: every reader takes a bounded piece, and what goes on to people's terminals is printable.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from upstream.launcher.progress import progress

LIMIT = 64 << 20
"""Bytes at which the log is cut; the end of it is kept beside it, as ``….log.1``."""
KEPT = 4 << 20
TAIL_BYTES = 8192
TAIL_LINES = 20
SEARCHED_BYTES = 512 << 10
"""How much of the log's end is searched for the cause of a failure: tracebacks of a dozen processes are a tenth of that."""
LATELY = 60
"""Checks of the log that count as lately."""
_OWN = os.O_NOFOLLOW | os.O_CLOEXEC  # somebody else's link is not followed, be the folder as open as it may


class LogFile:
    """The log of the server ``name`` in ``folder`` (which exists and is private)."""

    def __init__(self, folder: Path, name: str, limit: int = LIMIT) -> None:
        # Quoting, unlike replacing, gives each name a file of its own.
        self.path = folder / f"{quote(name, safe='#@+=,')}.log"
        self._limit = limit
        self._begin = 0
        self._sizes: deque[int] = deque(maxlen=LATELY)

    @contextmanager
    def appending(self) -> Iterator[int]:
        """A file descriptor to append to, for a new process; ``tail`` speaks of what comes from now on. Raises OSError."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _OWN, 0o600)
        try:
            self._begin = os.fstat(fd).st_size
            self._sizes.clear()
            yield fd
        finally:
            os.close(fd)

    def tail(self) -> str:
        """The last lines of the present process, at most TAIL_LINES and TAIL_BYTES, joined by newlines; empty if there are none."""
        return "\n".join(_printable(self._text()).splitlines()[-TAIL_LINES:])

    def progress(self) -> str:
        """The last line of the present process that says something; empty if there is none."""
        return _printable(progress(self._text()))

    def text(self) -> str:
        """What the present process has written, at most the last SEARCHED_BYTES; empty if there is nothing."""
        return self._text(SEARCHED_BYTES)

    def recent_text(self) -> str:
        """What the present process has written since LATELY calls of ``rotate``, at most the last SEARCHED_BYTES."""
        return self._text(SEARCHED_BYTES, since=self._sizes[0] if self._sizes else 0)

    def rotate(self) -> None:
        """Cut the log if it has outgrown its limit, keeping the end; to be called regularly. Raises OSError.

        Truncating in place works because the server appends: its next line goes to the new end.
        """
        self._sizes.append(size := self.path.lstat().st_size)
        if size > self._limit:
            end = self._end(min(KEPT, self._limit))
            with open(self.path.with_suffix(".log.1"), "wb", opener=_own) as older:
                older.write(end)
            with open(self.path, "r+b", opener=_own) as present:
                present.truncate(0)
            self._begin = 0
            self._sizes.clear()

    def _text(self, most: int = TAIL_BYTES, since: int = 0) -> str:
        try:
            return self._end(most, since).decode(errors="replace")
        except OSError:
            return ""

    def _end(self, most: int, since: int = 0) -> bytes:
        with open(self.path, "rb", opener=_own) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, since, size - most))
            return file.read(most)


def _own(path: str, flags: int) -> int:
    """Opens our own file. As an opener, because ``open`` closes what it got from one even where it is a folder."""
    return os.open(path, flags | _OWN, 0o600)


def _printable(text: str) -> str:
    return "".join(char for char in text.strip() if char.isprintable() or char in "\n\t")
