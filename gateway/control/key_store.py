"""The keys of the store in a running gateway: followed in the database, copied to the local disk, sent to the workers.

The rules: the event loop waits for no database, so each query runs on a thread. Changes are applied in the order of the log, one after the
other, and a change costs the keys that it names. While the database is away, the keys that are known are served for ``store.max_age``.
After that they are unknown, and requests with an unknown key get 503.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gateway.config import Config, Problem, Team
from gateway.control.raises import Raises, decoded_key
from gateway.fleet.stored_keys import KeyEncoder
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import CALENDAR, Allowance, Key
from gateway.store.database import Changes, KeyDatabase
from gateway.store.decisions import Named
from gateway.store.entries import Holder
from gateway.store.local_copy import LocalCopy
from gateway.store.notifications import notifications
from gateway.store.service import CHANGE_TIMEOUT, KeyService
from gateway.store.state import Effect, StoreState
from gateway.system.garbage_collector import collector_paused
from gateway.telemetry.dependencies import Observation
from gateway.telemetry.metrics import Series
from gateway.usage.database import run_in_thread

_POLL = 0.5  # seconds between two polls
_READ_TIMEOUT = 10.0  # seconds for the changes since the last poll
_START_TIMEOUT = 3.0  # seconds that a start with a local copy waits for the database
_LOAD_TIMEOUT = 60.0  # seconds for everything
_COPY_TIMEOUT = 30.0
_CONFIRM_EVERY = 30.0  # seconds after which the local copy gets the time of the last poll
_RETRY_COPY = 2.0  # seconds after which the local copy is written again after a failure
_KEYS_IN_MESSAGE = 2_000
_log = logging.getLogger("vllm_gateway.control")
T = TypeVar("T")


@dataclass(eq=False)
class KeyStore:
    """Follows the store's database.

    ``send`` sends a message to every worker, and ``applied`` waits until the workers have applied it. ``raises`` are those in force, and
    ``raises_changed`` is called when others are stored.
    """

    _database: KeyDatabase
    _copy: LocalCopy
    _config: Config
    _send: Callable[[StoredKeys], None]
    _applied: Callable[[], Awaitable[None]]
    _raises: Raises
    _raises_changed: Callable[[], None]

    def __post_init__(self) -> None:
        assert self._config.store is not None, "there is no store"
        self._max_age = self._config.store.max_age
        self._state = StoreState(self._config, KeyEncoder)
        self._encoded: dict[str, bytes] = {}
        self._budgeted: dict[str, tuple[str, ...]] = {}  # the names of holders with budgets, by the ID of a key
        self._limited: dict[str, tuple[str, ...]] = {}  # the same of holders with budgets, limits per minute or of concurrency
        self._is_unknown = True
        self._confirmed = time.monotonic() - self._max_age  # when the database responded last
        self._copy_at = 0.0  # when the local copy is written next, if nothing changes
        self._is_copy_behind = False  # it lacks changes, so that it must be written completely
        self._copied: float | None = None  # when the database confirmed what is in the local copy; None without a copy
        self._is_copy_failing = False
        self._is_started = False
        self._error: str | None = None
        self._changed = asyncio.Event()
        self._following, self._changing = asyncio.Lock(), asyncio.Lock()

    # Start, and the loop

    async def start(self) -> None:
        """Learn the keys from the local copy and the database, or from either."""
        found = await run_in_thread(self._copy.read, _LOAD_TIMEOUT)
        if found is not None and (age := max(time.time() - found[1], 0.0)) < self._max_age:
            await self._load(found[0])
            self._confirmed = self._copied = time.monotonic() - age
        with suppress(DatabaseUnavailableError, TimeoutError):
            async with asyncio.timeout(_LOAD_TIMEOUT if self._is_unknown else _START_TIMEOUT):
                await self.follow()
        if self._is_unknown:
            _log.error("the keys of the store are unknown until its database responds: %s", self._error)

    async def run(self) -> None:
        """Follow the database until cancelled."""
        self._is_started = True
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.follow()
            except DatabaseUnavailableError:
                self._check_age()
            except Exception:  # noqa: BLE001  the outer edge: the next poll may succeed
                _log.exception("the changes of the store could not be applied; this is retried")

    def notify(self) -> None:
        """Poll the database now."""
        self._changed.set()

    async def follow(self) -> None:
        """Apply what has changed in the database. Raises DatabaseUnavailableError."""
        async with self._following:
            if self._is_copy_behind and self._is_started and time.monotonic() >= self._copy_at:
                await self._copy_to_disk(self._state.everything())
            position = None if self._is_unknown else self._state.position
            try:
                seconds = _LOAD_TIMEOUT if self._is_unknown else _READ_TIMEOUT
                changes = await run_in_thread(lambda: self._database.changes_since(position), seconds)
            except DatabaseUnavailableError as error:
                if self._error is None:
                    _log.error("the store's database does not respond: %s", error)
                self._error = str(error)
                raise
            if self._error is not None:
                _log.warning("the store's database is available again")
                self._error = None
            self._confirmed = now = time.monotonic()
            if changes.position != position or changes.is_complete:
                await (self._load(changes) if changes.is_complete else self._apply(changes))
            elif now < self._copy_at:
                return
            if changes.is_complete:  # many keys, for which neither a start nor a change waits
                self._is_copy_behind, self._copy_at = True, now
            elif not self._is_copy_behind:
                await self._copy_to_disk(changes)

    async def _copy_to_disk(self, changes: Changes) -> None:
        """Write changes to the local copy. After a failure it is written completely, because it lacks these changes."""
        confirmed, is_done = time.time() - self.age, False
        with suppress(DatabaseUnavailableError):  # the disk hangs
            is_done = await run_in_thread(lambda: self._copy.apply(changes, confirmed), _COPY_TIMEOUT)
        self._is_copy_behind, self._copy_at = not is_done, time.monotonic() + (_CONFIRM_EVERY if is_done else _RETRY_COPY)
        self._copied, self._is_copy_failing = self._confirmed if is_done else self._copied, not is_done

    async def _load(self, changes: Changes) -> None:
        """Use everything that exists. It is prepared on a thread, because there may be many keys."""
        config = self._config
        state = StoreState(config, KeyEncoder)
        with collector_paused():  # the result stays in memory
            effect = await run_in_thread(lambda: state.apply(changes), _LOAD_TIMEOUT)
        self._state, self._is_unknown = state, False
        self._learn_raises()
        self._use(effect)
        if config is not self._config:
            self._use(state.use_config(self._config))

    async def _apply(self, changes: Changes) -> None:
        effect = self._state.apply(changes)
        self._learn_raises()
        self._use(effect)

    def _learn_raises(self) -> None:
        if self._raises.learn(self._state.raises):
            self._raises_changed()

    def _use(self, effect: Effect) -> None:
        """Send what has changed to the workers. New workers get it from ``messages``."""
        changed = self._raises.encoded(effect.changed)
        if effect.is_reset:
            self._encoded, self._budgeted, self._limited = dict(changed), {}, {}
            messages = self.messages()
        else:
            for identity in effect.removed:
                self._encoded.pop(identity, None)
            self._encoded.update(changed)
            messages = _messages(changed, tuple(effect.removed), is_reset=False)
        for message in messages:
            self._send(message)
        for identity in (*effect.removed, *effect.changed):
            for known, names in ((self._budgeted, _BUDGETS), (self._limited, _COUNTED)):
                known.pop(identity, None)
                if holders := _holders_with(names, effect.changed.get(identity)):
                    known[identity] = holders
        for identity in effect.removed:
            if why := self._state.unserved.get(identity):
                _log.error("the key %s of the store is not served: %s", identity, why)

    def _check_age(self) -> None:
        if self._is_unknown or self.age < self._max_age:
            return
        _log.error("the store's database has not responded for %.0f s (store.max_age): its keys are not served any more", self.age)
        self._state, self._encoded, self._is_unknown = StoreState(self._config, KeyEncoder), {}, True
        self._budgeted, self._limited = {}, {}
        for message in self.messages():
            self._send(message)

    # For control

    def messages(self) -> Iterator[StoredKeys]:
        """Yield messages with all keys, for a new worker."""
        if self._is_unknown:
            yield StoredKeys(is_reset=True, is_unknown=True)
        else:
            yield from _messages(self._encoded, (), is_reset=True)

    def use_config(self, config: Config) -> None:
        """Use another configuration, in the same iteration of the event loop in which its snapshot is sent."""
        self._config = config
        if not self._is_unknown:
            self._use(self._state.use_config(config))

    def encode_again(self, holders: Iterable[Holder]) -> None:
        """Send the keys of some keys and teams, after their raises have ended."""
        ids = (each for kind, name in holders for each in ([name] if kind == "key" else self._state.keys_of_team(name)))
        self._use(self._state.again(each for each in ids if each in self._encoded))

    def conflicts(self, config: Config, file: str) -> list[Problem]:
        """Return what of a configuration is in the store as well."""
        return [Problem(file, 0, "", sentence) for _, sentence in self._state.conflicts(config)]

    @property
    def encoded(self) -> Mapping[str, bytes]:
        """The keys that are served, by ID. A key that did not change is the same object as before."""
        return self._encoded

    def key(self, identity: str) -> Key | None:
        """Return a key that is served, or None."""
        found = self._encoded.get(identity)
        return None if found is None else decoded_key(found)

    def team(self, identity: str) -> Team | None:
        """Return a team of the configuration or of the store, or None."""
        return self._state.team(identity)

    @property
    def teams(self) -> frozenset[str]:
        """The IDs of the store's teams."""
        return self._state.teams

    def keys_with_budgets(self) -> Iterator[Key]:
        """Yield the served keys that have a budget, or whose team has one."""
        return (decoded_key(self._encoded[identity]) for identity in self._budgeted)

    def used(self, is_known: Callable[[str], bool], *, only_budgets: bool) -> Iterator[Allowance]:
        """Yield the limits of each key and team whose use is counted. ``is_known`` returns this for the name of a holder.

        So a report costs the keys and teams that are used, and not the keys of a team. ``only_budgets``: only holders with a budget.
        """
        found: set[str] = set()
        for identity, holders in (self._budgeted if only_budgets else self._limited).items():
            if more := {holder for holder in holders if holder not in found and is_known(holder)}:
                found |= more
                yield from (each for each in decoded_key(self._encoded[identity]).allowances if each.holder in more)

    def count_of_team(self, team: str) -> int:
        """Return the number of a team's keys in the store."""
        return len(self._state.keys_of_team(team))

    def key_of_team(self, team: str) -> Key | None:
        """Return any key of a team that is served, or None."""
        return next(filter(None, map(self.key, self._state.keys_of_team(team))), None)

    async def change(self, work: Callable[[KeyService], T], record: Callable[[T], None], seconds: float = CHANGE_TIMEOUT) -> T:
        """Run a change, and return when the workers of this gateway have applied it. ``record`` gets its result before the commit.

        Raises RefusedChangeError, what ``record`` raises, and DatabaseUnavailableError also after ``seconds``. The change may then still
        be made.
        """
        service = KeyService(self._database.recorded(record), lambda: Named.by(self._config))
        async with self._changing:  # the database makes one change at a time, too
            done = await run_in_thread(lambda: work(service), seconds)
        with suppress(DatabaseUnavailableError):  # it is committed, and applied with the next poll
            await self.follow()
            await self._applied()
        return done

    async def read(self, work: Callable[[KeyDatabase], T]) -> T:
        """Run a query. Raises DatabaseUnavailableError."""
        return await run_in_thread(lambda: work(self._database), _READ_TIMEOUT)

    # For operators

    @property
    def age(self) -> float:
        """The seconds since the database confirmed the keys that are served."""
        return time.monotonic() - self._confirmed

    def series(self) -> Iterator[tuple[Series, float]]:
        """Yield the metrics of the store."""
        yield Series("key_store_keys", ()), self._state.count
        yield Series("key_store_age_seconds", ()), self.age
        if self._copied is not None:
            yield Series("key_store_copy_age_seconds", ()), time.monotonic() - self._copied
        for identity, moment in self._state.expiries.items():
            yield Series("key_expires_timestamp_seconds", (identity,)), moment

    def dependency(self) -> Observation:
        """Return the state of the database."""
        warning = "the local copy cannot be written, so it lacks changes after a restart" if self._is_copy_failing else None
        return Observation("key_store", error=self._error, warning=warning)

    def status(self) -> Mapping[str, Any]:
        """Return the entry of /status."""
        return {
            "keys": None if self._is_unknown else self._state.count,
            "age_s": self.age,
            "last_error": self._error,
            "not_served": dict(self._state.unserved),
        }


def _messages(changed: Mapping[str, bytes], removed: tuple[str, ...], *, is_reset: bool) -> Iterator[StoredKeys]:
    """Yield messages of a bounded size. The keys are encoded already."""
    encoded = [msgspec.Raw(each) for each in changed.values()]
    for start in range(0, max(len(encoded), 1), _KEYS_IN_MESSAGE):
        keys: Any = tuple(encoded[start : start + _KEYS_IN_MESSAGE])
        is_first = start == 0
        yield StoredKeys(keys, removed if is_first else (), is_reset=is_reset and is_first)


def _holders_with(names: frozenset[str], encoded: bytes | None) -> tuple[str, ...]:
    """Return the names of the holders of a key that have one of these limits, its own and its team's."""
    allowances = [] if encoded is None else _decode_limits(encoded).allowances
    return tuple([each["holder"] for each in allowances if not names.isdisjoint(each["limits"])])


class _Limited(msgspec.Struct):
    """The limits of a key, without the rest."""

    allowances: list[dict[str, Any]] = []


_decode_limits = msgspec.msgpack.Decoder(_Limited).decode
_BUDGETS = frozenset({"budgets", "session", *(f"{kind}_per_{window}" for kind in ("tokens", "cost") for window in CALENDAR)})
"""The fields of ``Limits`` with budgets."""
_COUNTED = _BUDGETS | {"requests_per_minute", "tokens_per_minute", "concurrent"}


@contextmanager
def notified(store: KeyStore, database: KeyDatabase) -> Iterator[None]:
    """Let a store notice the changes of other gateways at once, until the end of the block."""
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(store.notify)

    with notifications(database.engine, notify) if database.is_postgres else nullcontext():
        yield
