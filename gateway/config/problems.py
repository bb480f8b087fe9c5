"""The problems of a configuration file, which make it invalid, and notes, which do not.

Each is one line, with its position in the form of editors (``file:line``) and the path of the setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import ClassVar

Path = tuple[str | int, ...]
"""The path of a value in a document: keys and list positions from the top."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem. ``line`` counts from 1, and is 0 for the file as a whole. ``path`` may be empty."""

    file: str
    line: int
    path: str
    message: str
    label: ClassVar[str] = ""
    """The word before the message."""

    def __str__(self) -> str:
        position = f"{self.file}:{self.line}" if self.line else self.file
        return one_line(": ".join(part for part in (position, self.path, self.label, self.message) if part))


@dataclass(frozen=True, slots=True)
class Note(Problem):
    """A hint about a valid configuration, such as a setting that is probably a mistake."""

    label: ClassVar[str] = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem whose line is not determined yet."""

    path: Path
    message: str


class ConfigurationError(Exception):
    """A configuration is invalid.

    ``problems`` are all problems in the order of the files. ``files`` are the known files of the configuration; a change of any known
    file may make it valid.
    """

    def __init__(self, problems: Iterable[Problem], files: Iterable[FilePath] = ()) -> None:
        self.problems = tuple(problems)
        self.files = tuple(files)
        super().__init__("\n".join(map(str, self.problems)))


def in_order(problems: Iterable[Problem], first: str) -> list[Problem]:
    """Sort problems by file and line. The problems of the file ``first`` come first."""
    return sorted(problems, key=lambda problem: (problem.file != first, problem.file, problem.line))


def spelled(path: Path) -> str:
    """Return ``("models", 0, "launch")`` as ``models[0].launch``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return ``; did you mean `launch`?`` for the most similar of ``known``, or an empty text if none is similar."""
    near = similar(text, known)
    return "" if near is None else f"; did you mean `{near}`?"


def similar(text: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of ``known``, None if none is similar."""
    lowered = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(text.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[near[0]] if near else None


_VARIABLE = re.compile(r"\$\{(\w+)\}|\$([A-Z_][A-Z0-9_]*)|os\.environ/(\w+)|\{\{ *(?:env\.)?(\w+) *\}\}")


def unexpanded(text: str) -> str:
    """Return how to refer to an environment variable, if a text is a reference of another notation; else an empty text."""
    if (found := _VARIABLE.fullmatch(text)) is None:
        return ""
    name = next(filter(None, found.groups()))
    return f"this file has no such variables; write {{env: {name}}} where a secret is expected, and elsewhere the value itself"


def one_line(text: str) -> str:
    """Return ``text`` with every control character as an escape sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
