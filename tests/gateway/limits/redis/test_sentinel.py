"""The primary is found by Sentinels, also after a failover, and with or without a password of the Sentinels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.limits.decision import Amounts, Holder
from gateway.limits.redis.store import StoreUnavailableError
from gateway.snapshot.snapshot import Limits, LimitsStore
from tests.gateway.limits.redis.test_store import opened, ticking
from tests.support.ports import refusing
from tests.support.process import wait_for
from tests.support.redis_server import RedisServer, redis_server
from tests.support.running import until

NAME = "shared"
WANTED = [(Holder.placed("key a", Limits(tokens_per_day=100)), Amounts(1, 1, 10))]


def watching(primary: int) -> Callable[[Path], Sequence[str]]:
    """Return the options of a Sentinel that watches the primary at a port."""

    def options(folder: Path) -> Sequence[str]:
        config = folder / "sentinel.conf"
        lines = [f"sentinel monitor {NAME} 127.0.0.1 {primary} 1", f"sentinel down-after-milliseconds {NAME} 500"]
        config.write_text("\n".join(lines) + "\n")
        config.chmod(0o666)  # Sentinel rewrites it
        return str(config), "--sentinel"

    return options


def sentinels(*ports: int, **more: Any) -> LimitsStore:
    return LimitsStore(tuple(("127.0.0.1", port) for port in ports), NAME, timeout=30.0, **more)


@contextmanager
def replicated() -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """Run a primary, its replica, and a Sentinel that knows both."""
    with redis_server() as primary, redis_server() as replica, redis_server(watching(primary.port)) as sentinel:
        with replica.client() as each:
            each.replicaof("127.0.0.1", primary.port)
            wait_for(lambda: each.info("replication")["master_link_status"] == "up")
        with sentinel.client() as each:
            wait_for(lambda: each.execute_command("SENTINEL", "REPLICAS", NAME))
        yield primary, replica, sentinel


def begins_failover(sentinel: RedisServer) -> bool:
    """Let a Sentinel replace the primary. It refuses until it has checked the replica."""
    try:
        with sentinel.client() as each:
            return bool(each.execute_command("SENTINEL", "FAILOVER", NAME))
    except redis.ResponseError:
        return False


@pytest.mark.parametrize("is_killed", [False, True], ids=["by command", "after the primary's death"])
async def test_the_new_primary_counts_after_a_failover(is_killed: bool) -> None:
    with replicated() as (primary, replica, sentinel):
        async with opened(sentinels(sentinel.port)) as store:
            assert (await store.admit("r1", WANTED)).exceeded is None
            with replica.client() as each:
                wait_for(lambda: each.hget("vllm-gateway:key a", "dt") == b"10", why=lambda: "the replica has the count")
            if is_killed:
                primary.stop()
            else:
                wait_for(lambda: begins_failover(sentinel))
                with primary.client() as each:  # what it counts until then is lost
                    wait_for(lambda: each.info("replication")["role"] == "slave", 60.0)
            with replica.client() as each:
                wait_for(lambda: each.info("replication")["role"] == "master", 60.0)
            while True:
                await until(ticking(store, lambda: store._open_connection is not None))
                try:
                    assert (await store.admit("r2", WANTED)).exceeded is None
                    break
                except StoreUnavailableError:  # it was still the former primary
                    continue
        with replica.client() as each:
            assert each.hget("vllm-gateway:key a", "dt") == b"20"


@pytest.mark.parametrize("has_password", [False, True], ids=["without a password", "with the password of the store"])
async def test_sentinels_are_tried_in_order(has_password: bool) -> None:
    """The first refuses connections, the second knows no primary with that name."""
    with (
        redis_server() as primary,
        redis_server() as other,
        redis_server(watching(primary.port)) as sentinel,
        refusing() as port,
        primary.client() as of_primary,
        sentinel.client() as of_sentinel,
    ):
        for each in (of_primary, of_sentinel) if has_password else (of_primary,):
            each.acl_setuser("gateway", enabled=True, passwords=["+a-password"], keys=["*"], channels=["*"], commands=["+@all"])
        if has_password:
            of_sentinel.acl_setuser("default", enabled=False)
        async with opened(sentinels(port, other.port, sentinel.port, user="gateway", password="a-password")) as store:
            assert (await store.admit("r1", WANTED)).exceeded is None


async def test_why_no_sentinel_knows_the_primary() -> None:
    reported: list[str | None] = []
    with redis_server() as primary, redis_server(watching(primary.port)) as sentinel, refusing() as port:
        settings = LimitsStore((("127.0.0.1", sentinel.port), ("127.0.0.1", port)), "another")
        async with opened(settings, on_change=reported.append) as store:
            with pytest.raises(StoreUnavailableError):
                await store.admit("r1", WANTED)
    [reason] = reported
    assert reason is not None and f"127.0.0.1:{sentinel.port}: the Sentinel knows no primary another, 127.0.0.1:{port}: " in reason
