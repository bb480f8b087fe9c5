"""Collect the holders and keys that notices watch in the running gateway, and open the table of notices.

The rules: each holder is watched once, however many keys share it, and a key of the store is decoded once for each change of it. After each
slice the event loop gets its turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.engine import URL

from gateway.config import Config, HolderKind
from gateway.control.control import Control
from gateway.control.raises import decoded_key
from gateway.ledger.statements import batches
from gateway.ledger.store import database_url
from gateway.limits.end_users import fixed_holders, owner_of
from gateway.limits.user_table import shown_users, users_held
from gateway.limits.windows import moment, windows_of
from gateway.notices.notice import expiry_of
from gateway.notices.service import Holding, Notices
from gateway.notices.table import NoticeTable
from gateway.snapshot.snapshot import Allowance, Key, Snapshot

_SLICE = 500  # keys or holders of one slice
_MOST_EARLIER = 100_000  # end users from before the start that are watched


class _Facts(NamedTuple):
    """The watched facts of a key: its budgets, those of its team, and its expiry."""

    budgets: tuple[Allowance, ...]
    expires: float | None

    @classmethod
    def of(cls, key: Key) -> _Facts:
        return cls(tuple(each for each in key.allowances if windows_of(each.limits)), expiry_of(key))


class WatchedKeys:
    """The keys and teams of the configuration and of the store, as control serves them."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._of_snapshot: tuple[Snapshot | None, dict[str, _Facts]] = (None, {})
        self._of_store: dict[str, tuple[bytes, _Facts]] = {}
        self._earlier_users: list[Allowance] | None = None

    async def budgets(self, kinds: Collection[HolderKind]) -> AsyncIterator[Sequence[Holding]]:
        """Yield every holder with budgets in slices, end users only if they are one of these kinds."""
        if (snapshot := self._control.workers.snapshot) is None:
            return
        await self._learn(snapshot)
        holders = await self._holders(snapshot)
        for some in batches([each for each in holders if each.users is None], _SLICE):
            yield await self._states(snapshot, some)
            await asyncio.sleep(0)
        if "user" not in kinds:
            return
        for each in holders:
            if each.users is None:
                continue
            yield await self._states(snapshot, [replace(one, users=each.users) for one in fixed_holders(each)])
            held = users_held(self._control.workers.buckets, [each.holder])[owner_of(each.holder)]
            for start in range(0, held, _SLICE):
                yield await self._users(snapshot, each, start)
                await asyncio.sleep(0)
        for some in batches(await self._users_before(snapshot) if snapshot.uses_store else (), _SLICE):
            yield await self._states(snapshot, some)
            await asyncio.sleep(0)

    async def _holders(self, snapshot: Snapshot) -> Collection[Allowance]:
        """Return the budgets of keys, of their teams, and of teams that only tokens name: each holder once."""
        holders: dict[str, Allowance] = {}
        of_keys = (each for _, facts in self._facts() for each in facts.budgets)
        of_teams = (each for of_team in snapshot.teams.values() for each in of_team if windows_of(each.limits))
        for number, each in enumerate(chain(of_keys, of_teams), 1):
            holders[each.holder] = each
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        return holders.values()

    def expiries(self) -> Iterable[tuple[str, float]]:
        """Yield every key that expires with its time, in seconds since the epoch."""
        yield from ((key, facts.expires) for key, facts in self._facts() if facts.expires is not None)

    def _facts(self) -> Iterator[tuple[str, _Facts]]:
        yield from self._of_snapshot[1].items()
        yield from ((key, facts) for key, (_, facts) in self._of_store.items())

    async def _learn(self, snapshot: Snapshot) -> None:
        """Read what has changed since the last pass."""
        if self._of_snapshot[0] is not snapshot:
            facts: dict[str, _Facts] = {}
            for number, key in enumerate(snapshot.keys, 1):
                facts[key.id] = _Facts.of(key)
                if number % _SLICE == 0:
                    await asyncio.sleep(0)
            self._of_snapshot = snapshot, facts
        store = self._control.key_store
        stored = {} if store is None else dict(store.encoded)
        known = {identity: each for identity, each in self._of_store.items() if identity in stored}
        for number, (identity, encoded) in enumerate(stored.items(), 1):
            if identity not in known or known[identity][0] is not encoded:
                known[identity] = encoded, _Facts.of(decoded_key(encoded))
            if number % _SLICE == 0:
                await asyncio.sleep(0)
        self._of_store = known

    async def _states(self, snapshot: Snapshot, allowances: Sequence[Allowance]) -> list[Holding]:
        """Return the states of some holders. Counts of a limits store that does not respond are unknown."""
        if snapshot.uses_store:
            counts = await self._control.store_counts.read(allowances)
            return [Holding(each, counts[each.holder].budgets) for each in allowances if each.holder in counts]
        at = moment(time.monotonic(), time.time())
        return [Holding(each, self._control.workers.buckets.shown_states(each.holder, each.limits, at)) for each in allowances]

    async def _users(self, snapshot: Snapshot, allowance: Allowance, start: int) -> list[Holding]:
        """Return the states of some end users: of those from an index on. A limits store counts only some of them at the moment."""
        at = moment(time.monotonic(), time.time())
        shown = shown_users(self._control.workers.buckets, allowance, range(start, start + _SLICE), at)
        if snapshot.uses_store:
            return await self._states(snapshot, [each.allowance for each in shown if each.in_store_until > at.now])
        return [Holding(each.allowance, each.states) for each in shown]

    async def _users_before(self, snapshot: Snapshot) -> Sequence[Allowance]:
        """Return the end users that the store has counted before the start. Raises DatabaseUnavailableError."""
        if self._earlier_users is None:
            stored = () if self._control.key_store is None else self._control.key_store.keys_with_budgets()
            found = await self._control.store_counts.earlier_users(replace(snapshot, keys=(*snapshot.keys, *stored)))
            self._earlier_users = None if found is None else found[:_MOST_EARLIER]
        return self._earlier_users or ()


@contextmanager
def opened_notices(config: Callable[[], Config], watched: WatchedKeys, path: Path, state: Path) -> Iterator[Notices]:
    """Open the notices of a configuration. ``path`` is its file, and ``state`` the folder for what is stored between runs."""
    with closing(NoticeTable(_url(config(), path, state))) as table:
        yield Notices(config, watched, table)


def _url(config: Config, path: Path, state: Path) -> URL:
    """Return the database: that of the store or of the ledger, otherwise a file that only this gateway has."""
    file = Path(os.path.abspath(path))
    if config.database_url is not None:
        return database_url(config.database_url, file.parent)
    name = hashlib.sha256(str(file).encode()).hexdigest()[:16]
    return URL.create("sqlite", database=str(state / "notices" / f"{name}.db"))
