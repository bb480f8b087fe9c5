"""Verify chains: every line follows the one before it, and no checkpoint is missing.

``verify`` is pure, and ``verify_log`` reads a log for it.

It detects a changed, removed, inserted or reordered line by its HMAC, a chain that was computed without the key by its first line, and a
removed end by a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.audit.chain import START, Checkpoint, Line, is_next, read_line, signed_checkpoints
from gateway.audit.journal import checkpoint_file
from gateway.audit.lines import log_lines

if TYPE_CHECKING:
    from gateway.audit.log import Where

_PAUSE_EVERY = 200  # lines, after which other threads may run


class TooLongError(Exception):
    """The time for a verification has expired. ``entries`` were verified."""

    def __init__(self, entries: int) -> None:
        super().__init__(entries)
        self.entries = entries


@dataclass(frozen=True, slots=True)
class Broken:
    """The first broken entry. ``where`` names it, and ``why`` explains what is wrong."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(slots=True)
class _Chain:
    key: bytes | None = None
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint("", 0, START))


@dataclass(frozen=True, slots=True)
class Verified:
    """The result: entries that were read, the checkpoint of each chain, and what is broken first. None: nothing is.

    ``compared`` is the number of checkpoints from elsewhere.
    """

    entries: int
    checkpoints: Sequence[Checkpoint]
    broken: Broken | None
    compared: int = 0


def verify_log(log: Where, keys: Sequence[bytes], texts: Sequence[str] = (), older: Sequence[Path] = (), seconds: float = inf) -> Verified:
    """Verify a log, also against the checkpoint that its gateway has stored, and those in ``texts``.

    May take as long as the disk, ``seconds`` at most. Raises TooLongError, OSError and DatabaseUnavailableError.
    """
    stored = checkpoint_file(log.folder)  # read first: entries that are added meanwhile come after it
    known = [*texts, *([stored.read_text("ascii", "replace")] if stored.exists() else [])]
    expected = [checkpoint for text in known for key in keys for checkpoint in signed_checkpoints(text, key)]
    return verify(_in_time(log_lines(log, older), seconds), keys, expected)


def _in_time(lines: Iterable[tuple[str, bytes]], seconds: float) -> Iterator[tuple[str, bytes]]:
    until = time.monotonic() + seconds
    for number, line in enumerate(lines):
        if number % _PAUSE_EVERY == 0:
            time.sleep(0)
            if time.monotonic() > until:
                raise TooLongError(number)
        yield line


def verify(lines: Iterable[tuple[str, bytes]], keys: Sequence[bytes], checkpoints: Iterable[Checkpoint]) -> Verified:
    """Verify lines, each with the text that names it.

    The lines of one chain are in their order; chains may be mixed. A chain has one of the ``keys``. ``checkpoints`` were written elsewhere,
    and each must be in its chain.
    """
    chains: dict[str, _Chain] = {}
    count = compared = 0
    noted: dict[str, dict[int, str]] = {}
    for checkpoint in checkpoints:
        compared += 1
        noted.setdefault(checkpoint.chain, {})[checkpoint.seq] = checkpoint.mac
    broken = None
    for where, data in lines:
        count += 1
        if (line := read_line(data)) is None:
            broken = Broken(where, "is not an entry")
            break
        chain = chains.setdefault(line.chain, _Chain())
        if (broken := _next(chain, where, line, data, keys)) is not None:
            break
        expected = noted.get(line.chain, {}).pop(line.seq, line.mac)
        if expected != line.mac:
            broken = Broken(where, "is not the entry that a checkpoint names, so the chain was replaced")
            break
    if broken is None:
        broken = next((_missing(name, chains.get(name), seqs) for name, seqs in noted.items() if seqs), None)
    return Verified(count, [chain.checkpoint for chain in chains.values()], broken, compared)


def _next(chain: _Chain, where: str, line: Line, data: bytes, keys: Sequence[bytes]) -> Broken | None:
    """Check the next line of a chain, and move its checkpoint. Returns what is wrong with the line."""
    before = chain.checkpoint
    expected = before.seq + 1
    if line.seq != expected:
        if line.seq > expected:
            missing = f"entry {expected} is" if line.seq == expected + 1 else f"entries {expected} to {line.seq - 1} are"
            return Broken(where, f"has the number {line.seq}, but {missing} missing before it")
        return Broken(where, f"has the number {line.seq}, but follows entry {before.seq}: it was inserted or moved")
    if chain.key is None:
        chain.key = next((key for key in keys if is_next(data, before.mac, key)), None)
    if chain.key is None or not is_next(data, before.mac, chain.key):
        why = "it or the entry before it was changed" if before.seq else "it was changed, or the chain has another key"
        return Broken(where, f"its HMAC is wrong: {why}")
    chain.checkpoint = Checkpoint(line.chain, line.seq, line.mac)
    return None


def _missing(name: str, chain: _Chain | None, seqs: dict[int, str]) -> Broken:
    """Describe the checkpoints that are not in a chain."""
    last = 0 if chain is None else chain.checkpoint.seq
    return Broken(
        f"chain {name}, entry {last + 1}", f"is missing: a checkpoint names entry {max(seqs)}, and the chain ends with entry {last}"
    )
