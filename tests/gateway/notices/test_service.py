"""The notices of gateways that share a database: each arrives, also over restarts and with a receiver that fails half of the time."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import URL

from gateway.config import Config, HolderKind
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.store import database_url
from gateway.limits.windows import BudgetState, windows_of
from gateway.notices.service import Holding, Notices
from gateway.notices.table import NoticeTable
from gateway.snapshot.snapshot import Allowance, Limits
from tests.support.ports import refusing
from tests.support.webhooks import Receiver, receiver

LIMITS = Limits(tokens_per_day=100)
NOON = 1_795_608_000.0
DAY = 86400.0


@dataclass
class World:
    """Two gateways' view of the use of keys, and their common clock. It advances by itself, so that pauses end."""

    used: dict[str, int] = field(default_factory=dict)
    expiring: dict[str, float] = field(default_factory=dict)
    now: float = NOON

    async def budgets(self, _: Collection[HolderKind]) -> AsyncIterator[Sequence[Holding]]:
        for key, used in list(self.used.items()):
            states = [BudgetState(each, window.name, used, 0.0) for window in windows_of(LIMITS) for each in window.budgets]
            yield [Holding(Allowance(f"key {key}", LIMITS), states)]

    def expiries(self) -> Iterable[tuple[str, float]]:
        return self.expiring.items()

    def clock(self) -> float:
        return self.now


def config(*rules: dict[str, Any]) -> Config:
    return Config.model_validate({"notices": list(rules)})


def ops(where: Receiver, **more: Any) -> dict[str, Any]:
    return {"name": "ops", "webhook": where.url, **more}


@contextmanager
def opened(url: URL, world: World, settings: Config) -> Iterator[Notices]:
    with closing(NoticeTable(url)) as table:
        yield Notices(lambda: settings, world, table, world.clock)
        for thread in threading.enumerate():
            if thread.name == "ledger-query":
                thread.join()  # the rest of a query whose gateway was killed


@pytest.fixture
def database(url: str, tmp_path: Path) -> URL:
    return database_url(url, tmp_path)


def states(notices: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["subject"], each["state"]) for each in notices}


@pytest.mark.parametrize("seed", range(3))
def test_every_notice_arrives_and_a_known_id_is_the_same_notice(database: URL, seed: int) -> None:
    """Two gateways are restarted at any time, also in the middle of an attempt, and half of the requests to the receiver fail."""
    world, chance = World(), random.Random(seed)

    async def life(one: Notices) -> None:
        """Run until the end, which comes at any time."""

        async def work() -> None:
            for _ in range(chance.randrange(1, 5)):
                await one.watch_once()
                await one.deliver_once()

        task = asyncio.create_task(work())
        await asyncio.wait([task], timeout=chance.choice((0.0, 0.01, 0.05, None)))  # then the gateway is killed
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run(where: Receiver) -> None:
        settings = config(ops(where))
        for number in range(12):
            world.used[f"alice-{number}"] = chance.choice((79, 80, 100))
            world.expiring[f"bob-{number}"] = NOON + chance.choice((DAY, 8 * DAY))
            with opened(database, world, settings) as one, opened(database, world, settings) as other:
                await asyncio.gather(life(one), life(other))
            world.now += chance.choice((0.0, 1.0, 61.0))
        with opened(database, world, settings) as last:
            for _ in range(100):  # until the claims of gateways that were killed have expired, and each pause has ended
                await last.watch_once()
                await last.deliver_once()
                if not last.status()["waiting"]:
                    break
                world.now += 660.0
            assert {state for _, state in states(await last.recent(1000))} == {"sent"}

    with receiver(0.5, seed) as where:
        asyncio.run(run(where))
        expected = sorted(f"key {key}" for key, used in world.used.items() for share in (80, 100) if used >= share)
        assert where.subjects() == expected
        assert where.subjects("key.expires") == sorted(f"key {key}" for key, end in world.expiring.items() if end <= NOON + 7 * DAY)
        bodies = {(each["id"], str(sorted(each.items()))) for each in where.accepted}
        assert len(bodies) == len(where.known)  # a repetition says the same


def test_one_of_two_gateways_sends_a_notice(database: URL) -> None:
    world = World({f"alice-{number}": 80 for number in range(20)})

    async def run(where: Receiver) -> None:
        settings = config(ops(where))
        with opened(database, world, settings) as one, opened(database, world, settings) as other:
            for call in ("watch_once", "deliver_once", "deliver_once"):
                await asyncio.gather(*(getattr(each, call)() for each in (one, other)))

    with receiver() as where:
        asyncio.run(run(where))
        assert len(where.accepted) == len(where.known) == 20


def test_a_receiver_that_is_down_does_not_delay_another(tmp_path: Path) -> None:
    world = World({"alice": 100})

    async def run(where: Receiver, port: int) -> None:
        settings = config({"name": "down", "webhook": f"http://127.0.0.1:{port}"}, ops(where))
        with opened(database_url(f"sqlite:///{tmp_path}/n.db", tmp_path), world, settings) as one:
            await one.watch_once()
            await one.deliver_once()
            found = {series.labels: value for series, value in one.series() if series.family == "notices_total"}
            assert {labels: value for labels, value in found.items() if value} == {("down", "failed"): 2, ("ops", "sent"): 2}
            world.now += 5
            aged = {series: value for series, value in one.series() if series.labels == ("down",)}
            assert {series.family: value for series, value in aged.items()} == {"notices_waiting": 2, "notices_oldest_waiting_seconds": 5}
            world.now += 4 * DAY
            await one.deliver_once()
            assert {each["state"] for each in await one.recent(10) if each["notice"] == "down"} == {"failed"}
            assert one.status() == {"waiting": 0, "last_error": None}

    with receiver() as where, refusing() as port:
        asyncio.run(run(where, port))


def test_a_flood_of_notices_is_bounded_and_nothing_is_lost(tmp_path: Path) -> None:
    world = World({}, {f"key-{number}": NOON + DAY for number in range(1_050)})

    async def run(where: Receiver) -> None:
        with opened(database_url(f"sqlite:///{tmp_path}/n.db", tmp_path), world, config(ops(where))) as one:
            await one.watch_once()
            assert one.status()["waiting"] == 1_000
            while len(where.known) < 1_050:
                await one.deliver_once()
                await one.watch_once()
                assert one.status()["waiting"] <= 1_000

    with receiver() as where:
        asyncio.run(run(where))


def test_nothing_is_lost_while_the_database_is_away(tmp_path: Path) -> None:
    async def run(port: int) -> None:
        url = database_url(f"postgresql://nobody@127.0.0.1:{port}/none", tmp_path)
        with opened(url, World({"alice": 80}), config({"name": "ops", "webhook": "http://127.0.0.1:9"})) as one:
            for call in (one.watch_once, one.deliver_once, lambda: one.recent(1)):
                with pytest.raises(DatabaseUnavailableError):
                    await call()

    with refusing() as port:
        asyncio.run(run(port))


def test_a_test_notice_says_what_the_receiver_replied(tmp_path: Path) -> None:
    async def run(where: Receiver, port: int) -> None:
        settings = config(ops(where), {"name": "down", "webhook": f"http://127.0.0.1:{port}"})
        with opened(database_url(f"sqlite:///{tmp_path}/n.db", tmp_path), World(), settings) as one:
            trials = {trial.name: trial.result for trial in await one.test(None)}
            assert (trials["ops"].is_sent, trials["ops"].reply, trials["down"].is_sent) == (True, "ok", False)
            assert [trial.name for trial in await one.test("ops")] == ["ops"]
            assert await one.test("other") == []
            assert await one.recent(10) == []
        assert [each["event"] for each in where.accepted] == ["test", "test"]
        assert len(where.known) == 2

    with receiver() as where, refusing() as port:
        asyncio.run(run(where, port))
