"""What is said about a configuration file: problems that forbid it, and notes that do not.

Each names its place as an editor understands it (``file:line``) and the path of the setting, and is one line
whatever the file holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as FilePath

Path = tuple[str | int, ...]
"""Where a value is in a document: keys and list positions, from the top."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong. ``line`` counts from 1, and is 0 where the file as a whole is meant; ``path`` may be empty."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return one_line(": ".join(part for part in (place, self.path, self.message) if part))


@dataclass(frozen=True, slots=True)
class Note(Problem):
    """Something worth knowing: the setting is read and checked, and the configuration is good."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem before its place in a file is known."""

    path: Path
    message: str


class ConfigurationError(Exception):
    """A configuration cannot be used. ``problems`` holds everything that is wrong, in the order of the files, and ``files`` which
    files it depends on as far as they are known: when one of them changes, it may be good."""

    def __init__(self, problems: Iterable[Problem], files: Iterable[FilePath] = ()) -> None:
        self.problems = tuple(problems)
        self.files = tuple(files)
        super().__init__("\n".join(map(str, self.problems)))


def spelled(path: Path) -> str:
    """``("models", 0, "launch")`` as ``models[0].launch``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean `launch`?`` for the nearest of ``known``, or nothing when none is near."""
    lowered = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean `{lowered[near[0]]}`?" if near else ""


def one_line(text: str) -> str:
    """``text`` with every character that a terminal might act on written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
