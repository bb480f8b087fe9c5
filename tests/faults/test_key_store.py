"""Failures of the store of keys: its database is killed, cut off or replaced, a disk is full, control is killed during changes.

Two gateways share the store where its database is PostgreSQL. The rules that hold in every case: an acknowledged change is not lost; no
change is half done; a known key is never refused.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from sqlalchemy import select

from gateway.audit.table import AuditTable
from gateway.ledger.store import database_url
from gateway.store import schema
from gateway.store.database import KeyDatabase
from gateway.store.entries import key_summary
from tests.faults.conftest import FULL
from tests.support import full_disk
from tests.support.constant_load import Counts, constant_load
from tests.support.databases import server
from tests.support.key_store import ANY, KEYS, TOKEN, create, propagation, running, seconds_until, send, settings, share, status_of
from tests.support.postgres import Postgres, postgres, standby
from tests.support.process import PROGRAM, Gateway, wait_for
from tests.support.tcp_proxy import tcp_proxy

__all__ = ["server"]

CHANGED, RATE = (100, 500) if FULL else (10, 100)
KNOWN_RATE = 100 if FULL else 20  # requests per second with a known key, to each gateway
KILLED, OTHERS_KILLED = (50, 10) if FULL else (2, 2)
CUT = 60.0 if FULL else 6.0  # seconds
WITHIN = 5.0
"""Seconds within which a change is in force on a busy machine. The report has the measured times."""
SECRET = "a-secret-of-the-audit-log"


def audited(store: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return a configuration with an audit log in the table of the store's database."""
    folder.mkdir(exist_ok=True)
    (folder / "secret").write_text(SECRET)
    return settings(store, workers=1) | {"audit": {"secret": {"file": "secret"}}} | more


def verified(folder: Path) -> None:
    """Check the chain of the audit log."""
    environ = {**os.environ, "XDG_STATE_HOME": str(folder), "ADMIN_TOKEN": TOKEN}
    line = [str(PROGRAM), "audit", "verify", "--config", str(folder / "gateway.yaml")]
    result = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@dataclass
class Acknowledged:
    """A key as the last response has shown it. ``is_uncertain``: a later change got no response, or 503."""

    version: int
    state: str
    is_deleted: bool = False
    is_uncertain: bool = False


class _UnacknowledgedError(Exception):
    """A change got no response, or 503."""


class Changing:
    """Clients that change keys without a pause, each its own keys. ``send`` sends a request to the gateway of the moment."""

    def __init__(self, send: Callable[..., httpx2.Response], name: str, clients: int = 2) -> None:
        self._send = send
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(f"{name}-{number}",)) for number in range(clients)]
        self._failure: BaseException | None = None
        self.keys: dict[str, Acknowledged] = {}
        self.changes: list[tuple[str, int]] = []  # that were acknowledged: ID and version, without deletions
        self.unacknowledged = 0

    def __enter__(self) -> Changing:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()
        assert self._failure is None, self._failure

    def wait(self, more: int) -> None:
        """Wait for this number of further acknowledged changes."""
        goal = len(self.changes) + more
        wait_for(lambda: len(self.changes) >= goal or self._failure, 180)

    def _work(self, name: str) -> None:
        choose, number, identity = random.Random(name), 0, ""
        try:
            while not self._stop.is_set():
                known = self.keys.get(identity)
                if known is None or known.is_deleted or known.is_uncertain:
                    number += 1
                    identity = f"{name}-{number}"
                    known = None
                try:
                    self._change(identity, known, choose)
                except _UnacknowledgedError:
                    self.unacknowledged += 1
                    self.keys.setdefault(identity, Acknowledged(0, "")).is_uncertain = True
                    self._stop.wait(0.2)
        except BaseException as error:
            self._failure = error

    def _change(self, identity: str, known: Acknowledged | None, choose: random.Random) -> None:
        path = f"{KEYS}/{identity}"
        if known is None:
            self._note(identity, self._sent("POST", KEYS, {"id": identity}))
            return
        operation = choose.choice(("change", "rotate", "revoke", "delete") if known.state == "valid" else ("change", "restore", "delete"))
        if operation == "delete":
            self._sent("DELETE", path)
            known.is_deleted = True
        elif operation == "change":
            self._note(identity, self._sent("PATCH", path, {"priority": choose.randrange(1, 1_000_000)}))
        else:
            self._note(identity, self._sent("POST", f"{path}/{operation}", {"overlap": "0s"} if operation == "rotate" else {}))

    def _note(self, identity: str, reply: httpx2.Response) -> None:
        version = int(reply.headers["etag"].strip('"'))
        self.keys[identity] = Acknowledged(version, reply.json()["state"])
        self.changes.append((identity, version))

    def _sent(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        try:
            reply = self._send(method, path, headers=ANY, json=body)
        except httpx2.HTTPError as error:
            raise _UnacknowledgedError from error
        if reply.status_code == 503:
            raise _UnacknowledgedError
        assert reply.status_code in (200, 201, 204), reply.text
        return reply


def check(store: str, folder: Path, changing: Changing) -> int:
    """Check that no acknowledged change is lost, and none is half done: the tables, the change log and the audit log agree.

    Returns the number of changes that were recorded and not made, for each of which the audit log has a later entry.
    """
    url = database_url(store, folder)
    with closing(KeyDatabase(url)) as database, database.engine.connect() as connection:
        keys = {row.id: row for row in connection.execute(select(schema.KEYS))}
        hashes = {(row.hash, row.key) for row in connection.execute(select(schema.KEY_HASHES))}
        log = {row.seq: row.id for row in connection.execute(select(schema.CHANGES).order_by(schema.CHANGES.c.seq))}
    with closing(AuditTable(url)) as table:
        entries = [entry for entry in (msgspec.json.decode(line) for _, line in table.read()) if entry["action"].startswith("key.")]
    for identity, known in changing.keys.items():
        version = None if identity not in keys else keys[identity].version
        if known.is_deleted:
            assert version is None, f"the deletion of {identity} is lost"
        elif known.is_uncertain:
            assert version is None or version >= known.version, f"a change of {identity} is lost"
        else:
            assert version == known.version, f"a change of {identity} is lost"
    assert set(changing.changes) <= {(identity, seq) for seq, identity in log.items()}
    assert list(log) == list(range(1, len(log) + 1)), "the numbers of the changes have gaps"
    last = {identity: seq for seq, identity in log.items()}
    assert {name: row.version for name, row in keys.items()} == {name: seq for name, seq in last.items() if name in keys}
    assert hashes == {(one, name) for name, row in keys.items() for one in key_summary(row.entry).hashes}
    logged = {(identity, seq) for seq, identity in log.items()}
    recorded, doubtful = set[tuple[str, int]](), set[str]()
    for entry in entries:
        identity, before, after = entry["target"], entry["before"], entry["after"]
        if entry["action"].endswith(".unconfirmed"):
            doubtful.add(identity)
        elif after is not None:
            recorded.add((identity, after["version"]))
        else:
            recorded.add((identity, next((seq for seq, name in log.items() if name == identity and seq > before["version"]), -1)))
    assert logged <= recorded, f"changes without an entry in the audit log: {logged - recorded}"
    assert {identity for identity, _ in recorded - logged} <= doubtful, f"entries without a change: {recorded - logged}"
    return len(recorded - logged)


def served(counts: Counts) -> None:
    """Check that every request of a load with a known key was served."""
    assert counts.sent > 0 and (counts.failed, counts.refused) == (0, 0), counts


# Propagation


@pytest.mark.row(35)
def test_changes_are_in_force_on_another_gateway_under_load(server: Postgres, tmp_path: Path, measured: Callable[[str], None]) -> None:
    config = settings(server.database(), workers=1)
    with running(tmp_path / "a", config) as a, running(tmp_path / "b", config) as b:
        found = propagation(a, b, CHANGED, RATE)
    for counts in found.loads:
        served(counts)
    slowest = max(*found.created, *found.revoked)
    assert slowest < WITHIN
    sent, rate = sum(one.sent for one in found.loads), sum(one.rate for one in found.loads)
    measured(
        f"{CHANGED} creations and {CHANGED} revocations at {rate:.0f} requests per second: in force after "
        f"{milliseconds(found.created)} and {milliseconds(found.revoked)} (p50/p99/longest); {sent:,} requests, 0 failed"
    )


def milliseconds(values: list[float]) -> str:
    return "/".join(f"{share(values, part) * 1000:.0f}" for part in (0.5, 0.99, 1)) + " ms"


# The database


@contextmanager
def known_key(*gateways: Gateway) -> Iterator[list[Counts]]:
    """Send requests with a key of the store to each gateway. At the end of the block, check that all were served."""
    token = create(gateways[0], "known")
    with ExitStack() as stack:
        for one in gateways:
            seconds_until(one.data, token, 200)
        loads = [stack.enter_context(constant_load(one.data, KNOWN_RATE, token)) for one in gateways]
        yield loads
    for counts in loads:
        served(counts)


def delivered(*gateways: Gateway) -> None:
    """Wait until the entries of the audit log are in the database."""
    for one in gateways:
        wait_for(lambda one=one: "vllm_gateway_audit_spool_entries 0.0" in send(one, "GET", "/metrics").text, 120)  # type: ignore[misc]


def summary(changing: Changing, unmade: int, loads: list[Counts], more: int = 0) -> str:
    """Describe a run. ``more``: served requests with a known key, besides those of the loads."""
    requests = sum(one.sent for one in loads) + more
    marked = f"; {unmade} marked as not made" if unmade else ""
    return f"{len(changing.changes)} changes, {requests:,} requests, 0 faults{marked}"


@pytest.mark.row(36)
def test_the_database_is_killed_during_changes(server: Postgres, tmp_path: Path, measured: Callable[[str], None]) -> None:
    store, chance = server.database(), random.Random(36)
    configs = [audited(store, tmp_path / name) for name in "ab"]
    with running(tmp_path / "a", configs[0]) as a, running(tmp_path / "b", configs[1]) as b:
        with known_key(a, b) as loads, Changing(partial(send, a), "database") as changing:
            for _ in range(OTHERS_KILLED):
                changing.wait(5)
                time.sleep(chance.random())
                server.kill()
                try:
                    failed = changing.unacknowledged
                    wait_for(lambda failed=failed: changing.unacknowledged > failed, 60)  # type: ignore[misc]
                finally:
                    server.start()
                changing.wait(1)
        delivered(a, b)
    unmade = check(store, tmp_path, changing)
    verified(tmp_path / "a")
    measured(f"database killed {OTHERS_KILLED} times: {summary(changing, unmade, loads)}")


@pytest.mark.row(36)
def test_the_network_to_the_database_is_cut(server: Postgres, tmp_path: Path, measured: Callable[[str], None]) -> None:
    store = server.database()
    with tcp_proxy(server.port) as network, ExitStack() as stack:
        config = audited(store.replace(f":{server.port}/", f":{network.port}/"), tmp_path / "a")
        a = stack.enter_context(running(tmp_path / "a", config))
        b = stack.enter_context(running(tmp_path / "b", audited(store, tmp_path / "b")))
        revoked = create(b, "revoked")
        seconds_until(a.data, revoked, 200)
        with known_key(a, b) as loads, Changing(partial(send, a), "network") as changing:
            changing.wait(5)
            network.cut()
            began = time.monotonic()
            wait_for(lambda: send(b, "POST", f"{KEYS}/revoked/revoke", headers=ANY).status_code == 200, 120)
            failed = changing.unacknowledged
            wait_for(lambda: changing.unacknowledged > failed, 120)
            time.sleep(max(began + CUT - time.monotonic(), 0))
            lasted = time.monotonic() - began
            assert status_of(a, revoked) == 200, "it cannot know"
            network.heal()
            known = seconds_until(a.data, revoked, 401)
            changing.wait(5)
        delivered(a, b)
        unmade = check(store, tmp_path, changing)
        verified(tmp_path / "a")
    measured(f"network cut for {lasted:.0f} s: {summary(changing, unmade, loads)}; a later revocation in force after {known:.1f} s")


@pytest.mark.row(36)
def test_a_standby_takes_over(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with postgres() as primary, standby(primary) as other, ExitStack() as stack:
        name = primary.database().rpartition("/")[2]
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in (primary, other))
        store = f"postgresql://postgres@{hosts}/{name}?target_session_attrs=read-write"
        a, b = (stack.enter_context(running(tmp_path / each, audited(store, tmp_path / each))) for each in "ab")
        with known_key(a, b) as loads, Changing(partial(send, a), "standby") as changing:
            changing.wait(10)
            primary.kill()
            began = time.monotonic()
            other.promote()
            changing.wait(1)
            unavailable = time.monotonic() - began
            token = create(b, "later")
            seconds_until(a.data, token, 200)
            changing.wait(5)
        delivered(a, b)
        unmade = check(other.url(name), tmp_path, changing)
        verified(tmp_path / "a")
    measured(f"failover to a standby: {summary(changing, unmade, loads)}; no changes for {unavailable:.1f} s")


# The disk


@pytest.mark.row(36)
@pytest.mark.skipif(not full_disk.allowed(), reason=full_disk.NOT_ALLOWED)
def test_the_disk_of_the_store_is_full(tmp_path: Path, measured: Callable[[str], None]) -> None:
    config = audited("sqlite:///disk/keys.db", tmp_path)
    with running(tmp_path, config, line=full_disk.line(tmp_path, tmp_path / "disk")) as one:
        disk = full_disk.Disk(one, tmp_path / "disk")
        with known_key(one) as loads, Changing(partial(send, one), "disk") as changing:
            changing.wait(5)
            disk.fill()
            wait_for(lambda: changing.unacknowledged > 3, 120)
            disk.free()
            changing.wait(5)
        delivered(one)
        for each in disk.path().glob("keys.db*"):  # SQLite would open the folder below the mount point
            shutil.copy(each, tmp_path)
    unmade = check("sqlite:///keys.db", tmp_path, changing)
    measured(f"disk of an SQLite store full: {summary(changing, unmade, loads)}")


@pytest.mark.row(36)
@pytest.mark.skipif(not full_disk.allowed(), reason=full_disk.NOT_ALLOWED)
def test_the_disk_of_the_local_copy_is_full(server: Postgres, tmp_path: Path, measured: Callable[[str], None]) -> None:
    folder = tmp_path / "vllm-gateway" / "store"
    with running(tmp_path, settings(server.database(), workers=1), line=full_disk.line(tmp_path, folder)) as one:
        disk = full_disk.Disk(one, folder)
        wait_for(lambda: list(disk.path().glob("*.db")))
        disk.fill()
        tokens = [create(one, f"key-{number}", labels={"note": "x" * 100}) for number in range(100)]
        wait_for(lambda: "the local copy of the store cannot be written" in one.output)
        entry = next(each for each in send(one, "GET", "/status").json()["dependencies"] if each["name"] == "key_store")
        assert entry["state"] == "degraded"
        assert {status_of(one, each) for each in tokens} == {200}
        disk.free()
        (copy,) = disk.path().glob("*.db")

        def copied() -> int:
            shutil.copy(copy, tmp_path / "copy.db")
            with closing(sqlite3.connect(tmp_path / "copy.db")) as reading, suppress(sqlite3.DatabaseError):  # it is being written
                count: int = reading.execute("SELECT count(*) FROM entries WHERE kind = 'key'").fetchone()[0]
                return count
            return 0

        wait_for(lambda: copied() == len(tokens), 60)
    measured(f"disk of the local copy full: {len(tokens)} of {len(tokens)} changes in force")


# Control


class KnownKey:
    """Sends requests with a key to the gateway of the moment, also while it starts and after it was killed."""

    def __init__(self, current: list[Gateway], token: str) -> None:
        self._current, self._token = current, token
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.served = 0
        self.failed: list[int] = []

    def __enter__(self) -> KnownKey:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            status = status_of(self._current[0], self._token)
            if status not in (0, 200):  # 0: there is no gateway
                self.failed.append(status)
            self.served += status == 200
            self._stop.wait(0.02)


@pytest.mark.row(36)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_control_is_killed_during_changes(server: Postgres, tmp_path: Path, kind: str, measured: Callable[[str], None]) -> None:
    folder, chance = tmp_path / "a", random.Random(kind)
    store = f"sqlite:///{tmp_path}/keys.db" if kind == "sqlite" else server.database()
    config, current, loads = audited(store, folder), list[Gateway](), list[Counts]()
    with ExitStack() as stack:
        with running(folder, config) as one:
            token = create(one, "used")
            current.append(one)
        if kind == "postgresql":
            b = stack.enter_context(running(tmp_path / "b", audited(store, tmp_path / "b")))
            loads = stack.enter_context(known_key(b))
        used = stack.enter_context(KnownKey(current, token))
        changing = stack.enter_context(Changing(lambda *request, **more: send(current[0], *request, **more), kind))
        for _ in range(KILLED):
            with running(folder, None) as one:
                current[0] = one
                changing.wait(chance.randrange(1, 4))
                time.sleep(chance.random() / 5)
                os.kill(one.process.pid, signal.SIGKILL)
                one.process.wait(60)
        with running(folder, None) as one:
            current[0] = one
            changing.wait(3)
            if kind == "postgresql":
                delivered(b)
            stack.pop_all().close()
            delivered(one)
    assert used.failed == [] and used.served > 0
    unmade = check(store, tmp_path, changing)
    verified(folder)
    measured(f"control killed {KILLED} times during changes, {kind}: {summary(changing, unmade, loads, used.served)}")


@pytest.mark.row(36)
@pytest.mark.timeout(1800)
def test_entries_that_wait_for_the_database_survive_kills(server: Postgres, tmp_path: Path, measured: Callable[[str], None]) -> None:
    store, chance, acknowledged = server.database(), random.Random(64), 0
    with running(tmp_path, audited(store, tmp_path)) as one:
        token = create(one, "alice")
    server.stop()
    try:
        for _ in range(OTHERS_KILLED):
            with running(tmp_path, None) as one:
                assert status_of(one, token) == 200
                for _ in range(chance.randrange(1, 20)):
                    acknowledged += send(one, "POST", "/reload").status_code == 200
                os.kill(one.process.pid, signal.SIGKILL)
                one.process.wait(60)
    finally:
        server.start()
    with running(tmp_path, None) as one:
        delivered(one)
    with closing(AuditTable(database_url(store, tmp_path))) as table:
        actions = [msgspec.json.decode(line)["action"] for _, line in table.read()]
    assert actions.count("config.reload") == acknowledged > 0
    verified(tmp_path)
    measured(f"control killed {OTHERS_KILLED} times while the database was down: {acknowledged} of {acknowledged} audit entries delivered")
