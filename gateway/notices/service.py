"""Watch budgets and expiries, store what is to be announced, and send it.

The rules: a notice is stored before it is sent, and it is sent until the receiver has accepted it or ``_GIVE_UP`` has passed. A pass over
all holders gives the event loop back after each slice, and takes at most a twentieth of the time. While the database is away nothing is
sent, and nothing is lost: the next pass finds the same notices.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from gateway.config import Config, HolderKind, NoticeRule
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.limits.windows import BudgetState, moment
from gateway.notices.notice import Notice, budget_notices, expiry_notices, trial_notice
from gateway.notices.receivers import Result, Sender
from gateway.notices.table import NoticeTable, Row, Waiting
from gateway.snapshot.snapshot import Allowance
from gateway.system.tasks import wait_at_most
from gateway.telemetry.metrics import Series
from gateway.usage.database import run_in_thread
from upstream.backoff import Backoff

_WATCH_INTERVAL = 5.0  # seconds between two passes
_SHARE = 20  # a pass is followed by a pause of at least so many times its length
_SEND_INTERVAL = 2.0  # seconds between two searches for due notices
_PRUNE_EVERY = 3600.0  # seconds
_AT_ONCE = 100  # due notices that are read together
_SEND_TIME = 5.0  # seconds after which a receiver gets no more notices before the next search
_MAX_WAITING = 1_000  # notices of a rule that wait; further ones are stored once these have been sent
_PAUSES = 2.0, 600.0  # seconds before a notice is sent again, at first and at most
_GIVE_UP = timedelta(days=3)
_TIMEOUT = 10.0  # seconds for the database
_log = logging.getLogger("vllm_gateway.control")
T = TypeVar("T")


class Holding(NamedTuple):
    """The limits of a holder, and the state of its budgets. The limits of end users have ``users``."""

    allowance: Allowance
    states: Sequence[BudgetState]


class Watched(Protocol):
    """The holders and keys that rules watch."""

    def budgets(self, kinds: Collection[HolderKind]) -> AsyncIterator[Sequence[Holding]]:
        """Yield the holders with budgets in slices: at least those of these kinds."""

    def expiries(self) -> Iterable[tuple[str, float]]:
        """Yield every key that expires with its time, in seconds since the epoch. It is current after ``budgets``."""


class Trial(NamedTuple):
    """The result of a test notice to a rule."""

    name: str
    result: Result


class Notices:
    """The notices of a running gateway. ``clock`` returns seconds since the epoch."""

    def __init__(self, config: Callable[[], Config], watched: Watched, table: NoticeTable, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._watched = watched
        self._table = table
        self._sender = Sender()
        self._clock = clock
        self._stored: dict[str, float] = {}  # the end of each notice that has a row, by ID
        self._waiting: Mapping[str, Waiting] = {}
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._problems: dict[str, str] = {}
        self._pruned = 0.0
        self._added = asyncio.Event()

    # Watch

    async def watch(self) -> None:
        """Store what is to be announced, until cancelled."""
        while True:
            started = time.monotonic()
            await self._attempt(self.watch_once, "stored")
            await asyncio.sleep(max(_WATCH_INTERVAL, _SHARE * (time.monotonic() - started)))

    async def watch_once(self) -> None:
        """Check all budgets and expiries once. Raises DatabaseUnavailableError."""
        rules, wall = self._rules, self._clock()
        self._stored = {identity: end for identity, end in self._stored.items() if end > wall}
        async for holdings in self._watched.budgets({kind for rule in rules for kind in rule.holders}):
            at = moment(0.0, wall)
            await self._store([notice for allowance, states in holdings for notice in budget_notices(rules, allowance, states, at)])
        expiries = (notice for key, expires in self._watched.expiries() for notice in expiry_notices(rules, key, expires, wall))
        await self._store(list(expiries))

    async def _store(self, found: Sequence[Notice]) -> None:
        new: dict[str, list[Notice]] = defaultdict(list)
        for notice in found:
            if notice.id not in self._stored:
                new[notice.rule].append(notice)
        now = self._now()
        for rule, notices in new.items():
            before = self._waiting.get(rule, Waiting(0, now))
            if not (added := notices[: max(_MAX_WAITING - before.number, 0)]):
                continue
            await self._use(functools.partial(NoticeTable.add, notices=added, now=now))
            self._waiting = {**self._waiting, rule: before._replace(number=before.number + len(added))}
            self._stored.update((notice.id, notice.end) for notice in added)
            self._added.set()

    # Send

    async def deliver(self) -> None:
        """Send what is due, until cancelled."""
        while True:
            await self._attempt(self.deliver_once, "sent")
            await wait_at_most(_SEND_INTERVAL, self._added.wait())
            self._added.clear()

    async def deliver_once(self) -> None:
        """Send the notices that are due, to all receivers at the same time. Raises DatabaseUnavailableError."""
        results = await asyncio.gather(*map(self._deliver_to, self._rules), return_exceptions=True)
        for result in results:  # each receiver's attempts have finished
            if isinstance(result, BaseException):
                raise result
        self._waiting = await self._use(lambda table: table.waiting())
        now = self._now()
        if now.timestamp() - self._pruned > _PRUNE_EVERY:
            await self._use(lambda table: table.prune(now))
            self._pruned = now.timestamp()

    async def _deliver_to(self, rule: NoticeRule) -> None:
        """Send notices to a receiver, one after the other. Raises DatabaseUnavailableError."""
        started, now = time.monotonic(), self._now()
        for row in await self._use(lambda table: table.due(rule.name, now, _AT_ONCE)):
            if time.monotonic() - started > _SEND_TIME:
                return  # the receiver is slow, and must not delay the next search for the others
            if await self._use(functools.partial(NoticeTable.claim, row=row, now=self._now())):
                await self._record(row, await self._sender.send(rule, self._config().smtp, row.id, row.body, self._clock()))

    async def _record(self, row: Row, result: Result) -> None:
        now = self._now()
        if result.is_sent:
            outcome = "sent"
            await self._use(lambda table: table.finish(row, "sent", result.text))
        elif now - row.created > _GIVE_UP:
            outcome = "given_up"
            text = "the notice %s of %s was not accepted for %d days and is not sent again: %s"
            _log.error(text, row.id, row.rule, _GIVE_UP.days, result.text)
            await self._use(lambda table: table.finish(row, "failed", result.text))
        else:
            outcome = "failed"
            if row.attempts == 0:
                _log.warning("the notice %s of %s was not accepted, and is sent again: %s", row.id, row.rule, result.text)
            pause = timedelta(seconds=Backoff(*_PAUSES, failures=row.attempts).next_pause())
            await self._use(lambda table: table.retry(row, now + pause, result.text))
        self._outcomes[row.rule, outcome] += 1

    # For operators

    async def test(self, name: str | None) -> list[Trial]:
        """Send a test notice to the rule of this name, or to all. It is sent once, and not stored."""
        rules = [rule for rule in self._rules if name in (None, rule.name)]
        wall = self._clock()
        notices = [trial_notice(rule, token_hex(8), wall) for rule in rules]
        smtp = self._config().smtp
        sent = (self._sender.send(rule, smtp, notice.id, notice.body(wall), wall) for rule, notice in zip(rules, notices, strict=True))
        return [Trial(rule.name, result) for rule, result in zip(rules, await asyncio.gather(*sent), strict=True)]

    async def recent(self, limit: int) -> list[dict[str, Any]]:
        """Return the last notices with their state, the newest first. Raises DatabaseUnavailableError."""
        return [_shown(row) for row in await self._use(lambda table: table.recent(limit))]

    def series(self) -> Iterable[tuple[Series, float]]:
        """Yield the metrics."""
        now = self._clock()
        for rule in (each.name for each in self._rules):
            for outcome in ("sent", "failed", "given_up"):
                yield Series("notices_total", (rule, outcome)), self._outcomes[rule, outcome]
            waiting = self._waiting.get(rule)
            yield Series("notices_waiting", (rule,)), waiting.number if waiting else 0
            yield Series("notices_oldest_waiting_seconds", (rule,)), max(now - waiting.oldest.timestamp(), 0.0) if waiting else 0.0

    def status(self) -> dict[str, Any]:
        """Return the entry of /status."""
        return {"waiting": sum(each.number for each in self._waiting.values()), "last_error": next(iter(self._problems.values()), None)}

    # Common

    @property
    def _rules(self) -> tuple[NoticeRule, ...]:
        return self._config().notices

    async def _use(self, work: Callable[[NoticeTable], T]) -> T:
        """Use the table on a thread. Raises DatabaseUnavailableError."""
        return await run_in_thread(lambda: work(self._table), _TIMEOUT)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    async def _attempt(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        """Do work that is repeated anyway, and log a failure once. ``what``: the verb of the log line."""
        try:
            await work()
        except DatabaseUnavailableError as error:
            if what not in self._problems:
                _log.error("notices cannot be %s, because their database does not respond: %s", what, error)
            self._problems[what] = str(error)
        except Exception as error:  # noqa: BLE001  the outer edge: the next pass may succeed
            _log.exception("notices could not be %s; this is retried", what)
            self._problems[what] = type(error).__name__
        else:
            if self._problems.pop(what, None) is not None:
                _log.warning("notices are %s again", what)


def _shown(row: Row) -> dict[str, Any]:
    document = msgspec.json.decode(row.body)
    return {
        "id": row.id,
        "notice": row.rule,
        "event": row.event,
        "subject": row.subject,
        "text": document["text"],
        "created": document["created"],
        "state": row.state,
        "attempts": row.attempts,
        "result": row.result or None,
    }
