"""The gateway connects to the host that accepts writes, as a user with few permissions, and over TLS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import inf
from pathlib import Path
from time import time

import pytest

from gateway.auth import keys
from gateway.limits.decision import Amounts, Holder
from gateway.limits.redis.observer import add_earlier_use, read_counts, upgrade_counts
from gateway.limits.redis.store import StoreUnavailableError
from gateway.snapshot.snapshot import Budget, Limits, LimitsStore
from tests.gateway.limits.redis.test_store import LIMITS, opened, ticking
from tests.support.certificates import certificate
from tests.support.ports import refusing, reserved
from tests.support.process import configuration, gateway, launched, wait_for
from tests.support.redis_server import RedisServer, redis_server
from tests.support.running import KEY, until

ROOT = Path(__file__).resolve().parents[4]


async def test_the_first_host_that_accepts_writes_is_used(server: RedisServer) -> None:
    wanted = [(Holder.placed("key a", Limits(tokens_per_day=100)), Amounts(1, 1, 10))]
    with refusing() as port, redis_server() as other, other.client() as client:
        client.replicaof("127.0.0.1", server.port)
        wait_for(lambda: client.info("replication")["master_link_status"] == "up")
        hosts = tuple(("127.0.0.1", each) for each in (port, other.port, server.port))
        async with opened(LimitsStore(hosts, timeout=30.0)) as store:
            assert (await store.admit("r1", wanted)).exceeded is None
            wait_for(lambda: client.hget("vllm-gateway:key a", "dt") == b"10")
            with server.client() as former:
                client.replicaof("NO", "ONE")
                former.replicaof("127.0.0.1", other.port)
                try:
                    with pytest.raises(StoreUnavailableError):
                        await store.admit("r2", wanted)
                    await until(ticking(store, lambda: store._is_available))
                    assert (await store.admit("r3", wanted)).exceeded is None
                    assert client.hget("vllm-gateway:key a", "dt") == b"20"
                finally:
                    former.replicaof("NO", "ONE")


async def test_a_user_with_the_documented_permissions() -> None:
    """The user of docs/scaling.md may do all that the gateway does."""
    line = next(line for line in (ROOT / "docs/scaling.md").read_text().splitlines() if line.startswith("user gateway "))

    def with_users(folder: Path) -> Sequence[str]:
        (folder / "users.acl").write_text(f"user default on nopass ~* &* +@all\n{line}\n")
        return "--aclfile", str(folder / "users.acl")

    _, user, _, password, *_ = line.split()
    holder = Holder.placed("key a", LIMITS, 0, {"30d": 0, "7d": 0})
    session = Holder.placed("session a b", Limits(budgets=(Budget("session", tokens=100),)), 0, {"session": 0})
    with redis_server(with_users) as server:
        async with opened(server.store_config(user=user, password=password.removeprefix(">"))) as store:
            for number in range(2):
                wanted = [(holder, Amounts(1, 1, 10)), (session, Amounts(1, 0, 10))]
                assert (await store.admit(f"r{number}", wanted)).exceeded is None
                store.settle(f"r{number}", wanted, Amounts(1, 0, 5))
            await store.read("r3", [holder])
            store._renewed = -inf
            await until(ticking(store, lambda: not store._unacknowledged))
            await add_earlier_use(store, holder, {("day", int(time() // 86400)): (5, 5)})
            await upgrade_counts(store)
            assert (await read_counts(store, [holder]))["key a"].is_restored
            assert store._is_available
        with server.client() as each:
            assert each.acl_log() == []


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_certificate_is_verified(tmp_path: Path, is_trusted: bool) -> None:
    """The authorities are those of the environment. Without the right one the store is down."""

    def encrypted(folder: Path) -> Sequence[str]:
        for file in certificate(folder):
            file.chmod(0o644)
        files = ("--tls-cert-file", str(folder / "cert.pem"), "--tls-key-file", str(folder / "key.pem"))
        return *files, "--tls-ca-cert-file", str(folder / "cert.pem"), "--tls-auth-clients", "no", "--tls-port", str(port)

    limited = {"id": "team-a", "hash": keys.hash_of(KEY), "limits": {"concurrent": 3, "tokens_per_day": 1000}}
    with reserved() as port, redis_server(encrypted) as server, server.client() as each:
        config = configuration(launched("m", **{"sim-tokens": 4})) | {"keys": [limited], "limits_store": f"rediss://localhost:{port}/0"}
        authorities = str(server.folder / "cert.pem") if is_trusted else os.devnull
        with gateway(tmp_path, config, variables={"SSL_CERT_FILE": authorities}) as one:
            assert one.request(model="m", max_tokens=4).status_code == 200
            if is_trusted:  # a request that came before the connection is not counted there
                wait_for(lambda: one.request(model="m", max_tokens=4).is_success and each.exists("vllm-gateway:key team-a"))
                wait_for(lambda: one.metric('vllm_gateway_dependency_up{dependency="limits_store"}') == 1)
            else:
                wait_for(lambda: "certificate verify failed" in one.get("/status").text)
                assert not each.exists("vllm-gateway:key team-a")
