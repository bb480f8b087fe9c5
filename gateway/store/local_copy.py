"""A copy of the store on the gateway's own disk. With it, known keys are served while the database is down, also after a restart.

The rules: only the gateway's user can read the copy, because it has the hashes of keys. A change of the store changes the entries of the
change, in one transaction with the position of the log. The copy is a cache: if it cannot be read or written, the database decides alone.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.store.database import Changed, Changes
from gateway.store.entries import Kind, Position

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (kind TEXT, id TEXT, entry TEXT, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (only INTEGER PRIMARY KEY CHECK (only = 1), seq INTEGER, mark TEXT, confirmed REAL);
"""
_FORMAT = 1
_KINDS: tuple[Kind, Kind] = ("key", "team")
_RAISED: Mapping[Kind, str] = {"key": "raises of key", "team": "raises of team"}
_log = logging.getLogger("vllm_gateway.control")


class LocalCopy:
    """The copy in a file. Calls may wait for the disk. A failure is logged, and changes nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def read(self) -> tuple[Changes, float] | None:
        """Return everything in the copy, and when the database confirmed it last, in seconds since the epoch. None without a copy."""
        try:
            connection = self._opened()
            state = connection.execute("SELECT seq, mark, confirmed FROM state").fetchone()
            if state is None:
                return None
            seq, mark, confirmed = state
            read = "SELECT id, entry FROM entries WHERE kind = ?"
            keys, teams = (Changed(dict(connection.execute(read, (kind,)))) for kind in _KINDS)
            raises = {(kind, identity): text for kind in _KINDS for identity, text in connection.execute(read, (_RAISED[kind],))}
            return Changes(Position(seq, mark), keys, teams, is_complete=True, raises=raises), confirmed
        except (sqlite3.Error, OSError, ValueError) as error:
            self._failed("read", error)
            return None

    def apply(self, changes: Changes, confirmed: float) -> bool:
        """Apply changes that the database confirmed at a time, in seconds since the epoch. Returns whether they are on the disk.

        After a failure the copy lacks them, so that the next changes must be complete.
        """
        try:
            with self._opened() as connection:
                if changes.is_complete:
                    connection.execute("DELETE FROM entries")
                connection.executemany("DELETE FROM entries WHERE kind = ? AND id = ?", _former_raises(changes))
                raised = ((_RAISED[kind], identity, text) for (kind, identity), text in changes.raises.items())
                connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", raised)
                for kind, changed in zip(_KINDS, (changes.keys, changes.teams), strict=True):
                    connection.executemany("DELETE FROM entries WHERE kind = ? AND id = ?", [(kind, each) for each in changed.removed])
                    written = ((kind, identity, entry) for identity, entry in changed.entries.items())
                    connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", written)
                connection.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?, ?)", (*changes.position, confirmed))
        except (sqlite3.Error, OSError) as error:
            self._failed("written", error)
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _opened(self) -> sqlite3.Connection:
        """Open the file, or create it for this user only. Raises OSError and sqlite3.Error."""
        if self._connection is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            self._path.chmod(0o600)
            connection = sqlite3.connect(self._path, check_same_thread=False)  # one thread at a time uses it
            try:
                connection.execute("PRAGMA secure_delete=ON")
                connection.execute("PRAGMA synchronous=FULL")
                if connection.execute("PRAGMA user_version").fetchone() != (_FORMAT,):
                    connection.executescript(f"DROP TABLE IF EXISTS entries; DROP TABLE IF EXISTS state; PRAGMA user_version={_FORMAT};")
                connection.executescript(_TABLES)
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _failed(self, what: str, error: Exception) -> None:
        _log.error("the local copy of the store cannot be %s: %s", what, error)
        self.close()


def _former_raises(changes: Changes) -> Iterator[tuple[str, str]]:
    """Yield the kind and the ID of all raises that changes replace or end."""
    for kind, changed in zip(_KINDS, (changes.keys, changes.teams), strict=True):
        yield from ((_RAISED[kind], identity) for identity in (*changed.entries, *changed.removed))
