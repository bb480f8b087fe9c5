"""Find, add and change the entries of keys in the configuration's files.

The rules: a file is written only if the result contains exactly what it contained before and the change, and if the configuration gets no
new problem. It is replaced atomically, with its owner and mode, so no reader sees a part of it. Only one command writes at a time, so no
command overwrites the change of another. The texts here contain only hashes, never a key.
"""

from __future__ import annotations

import copy
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.config import ConfigurationError, Problem, load
from gateway.config.references import ConfigValue, hashes_of
from gateway.config.source import Source, parse, reason
from gateway.key_management.yaml_edit import UneditableError, append_entries, set_field

_IN_ENTRY = re.compile(r"keys\[(\d+)\]\.?")


class KeyFileError(Exception):
    """The change was not made. The text explains the reason to the operator."""


class InvalidResultError(KeyFileError):
    """The configuration would become invalid: ``problems`` says why."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("the configuration would become invalid")
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class _KeyFile:
    """A file with entries. ``path``: the path of their list in the document."""

    file: Path
    text: str
    source: Source
    path: tuple[str, ...]

    @property
    def document(self) -> ConfigValue:
        return ConfigValue(self.source, (), self.source.value)

    @property
    def entries(self) -> list[ConfigValue]:
        return [entry for entry in self.document.get(*self.path).items() if isinstance(entry.value, dict)]


class KeyFiles:
    """The keys of the configuration ``file``: its own, and those of its keys_file. Raises KeyFileError for an unreadable file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        main = _read_file(file)
        named = main.source.at(("keys_file",))
        self._files = [main, *([_read_file(file.parent / named)] if isinstance(named, str) and named else [])]

    def entry(self, identity: str) -> Mapping[str, Any]:
        """Return the entry of an id, as it is written. Raises KeyFileError."""
        found: dict[str, Any] = self._find(identity)[1].value
        return found

    @property
    def hashes(self) -> frozenset[str]:
        """The valid hashes of all entries."""
        return frozenset(one.value for page in self._files for entry in page.entries for one in hashes_of(entry))

    @property
    def ids(self) -> frozenset[str]:
        """Ids of all entries."""
        return frozenset(str(entry.value.get("id")) for page in self._files for entry in page.entries)

    @property
    def teams(self) -> frozenset[str]:
        """Ids of the configuration's teams."""
        return frozenset(str(team.value.get("id")) for team in self._files[0].document.each("teams") if isinstance(team.value, dict))

    def add(self, entries: Sequence[Mapping[str, Any]]) -> Path:
        """Add entries to the file's ``keys``, or to keys_file if it has none; returns the file. Raises KeyFileError."""
        page = self._target
        expected = copy.deepcopy(page.source.value) or {}
        if page.path:
            expected["keys"] = [*(expected.get("keys") or []), *entries]
        else:
            expected = [*expected, *entries]
        self._write(
            page, lambda text: append_entries(text, page.path, entries), expected, "`vllm-gateway keys new` prints what to add by hand"
        )
        return page.file

    def added_entry(self, problem: Problem) -> tuple[int, str] | None:
        """Return the number of the added entry that a problem is about, and the path in it; None for other problems."""
        listed = self._target.source.at(self._target.path)
        found = _IN_ENTRY.match(problem.path)
        if found is None or os.path.abspath(problem.file) != os.path.abspath(self._target.file):
            return None
        number = int(found[1]) - (len(listed) if isinstance(listed, list) else 0)
        return None if number < 0 else (number, problem.path[found.end() :])

    @property
    def _target(self) -> _KeyFile:
        """The file that receives new entries."""
        return self._files[0] if self._files[0].source.at(("keys",)) is not None else self._files[-1]

    def change(self, identity: str, fields: Mapping[str, Any]) -> Path:
        """Set fields of an id's entry, all of them or none; returns the file. Raises KeyFileError."""
        page, entry = self._find(identity)
        expected = copy.deepcopy(page.source.value)
        target: Any = expected
        for part in entry.path:
            target = target[part]
        target.update(fields)

        def edit(text: str) -> str:
            for name, value in fields.items():
                text = set_field(text, entry.path, name, value)
            return text

        named = " and ".join(f"`{name}`" for name in fields)
        self._write(page, edit, expected, f"set {named} of `{identity}` in {page.file} by hand")
        return page.file

    def _find(self, identity: str) -> tuple[_KeyFile, ConfigValue]:
        found = [(page, entry) for page in self._files for entry in page.entries if entry.value.get("id") == identity]
        if not found:
            raise KeyFileError(f"there is no key {identity} in {' or '.join(str(page.file) for page in self._files)}")
        return found[0]

    def _write(self, page: _KeyFile, edit: Callable[[str], str], expected: Any, by_hand: str) -> None:
        try:
            text = edit(page.text)
        except UneditableError as error:
            raise KeyFileError(f"{page.file} cannot be edited automatically ({error}); {by_hand}") from error
        made = parse(text, str(page.file) if page is self._files[0] else os.path.abspath(page.file))
        if not made.whole or made.value != expected:
            raise KeyFileError(f"{page.file} cannot be edited automatically; {by_hand}")
        self._check(page, made)
        _replace_file(page, text)

    def _check(self, page: _KeyFile, made: Source) -> None:
        """Raise InvalidResultError for problems that the change causes.

        Earlier problems do not count: a secret may be unavailable here.
        """
        after = self._problems({Path(os.path.abspath(page.file)): made})
        before = set(self._problems({})) if after else set()
        if new := [each for each in after if each not in before]:
            raise InvalidResultError(new)

    def _problems(self, instead: Mapping[Path, Source]) -> list[Problem]:
        """Return the problems without their lines, because some are lines of a text that is not written."""
        try:
            load(self._file, instead=instead)
        except ConfigurationError as error:
            return [replace(each, line=0) for each in error.problems]
        return []


def _read_file(file: Path) -> _KeyFile:
    try:
        text = file.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{file} cannot be read: {reason(error)}") from error
    source = parse(text.removeprefix("\ufeff"), str(file))
    if not source.whole or source.problems:
        raise InvalidResultError(source.problems)
    return _KeyFile(file, text, source, () if isinstance(source.value, list) else ("keys",))


def _replace_file(page: _KeyFile, text: str) -> None:
    """Replace the file, or the target of a link, atomically. Raises KeyFileError."""
    target = Path(os.path.realpath(page.file))
    try:
        with _locked(target.parent):
            if target.read_bytes() != page.text.encode():
                raise KeyFileError(f"{page.file} was changed by another program in the meantime; try again")
            _replace(target, text.encode())
    except OSError as error:
        raise KeyFileError(f"{page.file} cannot be written: {reason(error)}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands from replacing files in this folder. The files cannot be locked, because each replacement is a new file."""
    with ExitStack() as stack:
        with suppress(OSError):  # a folder without read permission, or a file system without locks
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _replace(target: Path, data: bytes) -> None:
    found = target.stat()
    fd, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchown(fd, found.st_uid, found.st_gid)
            os.fchmod(fd, found.st_mode & 0o7777)
            os.fsync(fd)
        os.replace(fresh, target)
    except BaseException:
        os.unlink(fresh)
        raise
