"""Measures the store of keys by the number of its keys: start, memory for each key, and the time of a change.

``python -m tests.benchmarks.key_store`` writes the results into docs/performance/key-store.json. The rule: each number comes from whole
gateways, as an operator runs them, and a change counts when it is in force.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import psutil

from gateway.ledger.store import database_url
from gateway.store.database import KeyDatabase
from tests.support import key_store
from tests.support.key_store import KEYS, TOKEN, propagation, settings, status_of
from tests.support.postgres import postgres
from tests.support.process import Gateway, gateway, wait_for
from tests.support.running import KEY

REPORT = Path(__file__).resolve().parents[2] / "docs" / "performance" / "key-store.json"
SIZES = (0, 100, 10_000, 100_000)
CHANGES = 100
LAST = "sk-the-last-key"
_RATE = 500  # requests per second during changes on two gateways


def fill(url: str, folder: Path, count: int) -> None:
    """Add keys with a limit each. The last one has the key ``LAST``."""

    def entry(number: int) -> str:
        token = LAST if number == count - 1 else f"key {number}"
        digest = f"sha256:{sha256(token.encode()).hexdigest()}"
        return json.dumps({"id": f"key-{number}", "hash": [digest], "limits": {"requests_per_minute": 60}})

    with closing(KeyDatabase(database_url(url, folder))) as database:
        database.change(lambda transaction: transaction.add_all("key", {f"key-{number}": entry(number) for number in range(count)}))


@contextmanager
def running(folder: Path, written: dict[str, Any] | None, token: str) -> Iterator[tuple[Gateway, float]]:
    """Run a gateway. Yields it, and the seconds from its start until a request with the token is accepted."""
    began = time.perf_counter()
    with gateway(folder, written, variables={"ADMIN_TOKEN": TOKEN}, ready=False) as one:
        wait_for(lambda: status_of(one, token) == 200, 120, why=lambda: one.output)
        yield one, time.perf_counter() - began


def cpu_until_now(one: Gateway) -> float:
    """Return the CPU seconds of control and of one worker, which a start needs one after the other."""
    times = (psutil.Process(pid).cpu_times() for pid in (one.process.pid, one.workers()[0]))
    return sum(each.user + each.system for each in times)


def memory(one: Gateway) -> tuple[int, int]:
    """Return the private bytes of control, and of one worker."""
    return psutil.Process(one.process.pid).memory_full_info().uss, psutil.Process(one.workers()[0]).memory_full_info().uss


def share(values: list[float], part: float) -> float:
    return round(sorted(values)[min(int(len(values) * part), len(values) - 1)], 1)


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def by_size(count: int) -> dict[str, Any]:
    """Measure one gateway with this number of keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill("sqlite:///keys.db", folder, count)
        token = LAST if count else KEY
        with running(folder, settings("sqlite:///keys.db"), token) as (one, first):
            cpu = cpu_until_now(one)
        with running(folder, None, token) as (one, again), httpx2.Client(verify=False, timeout=60) as client:
            used = memory(one)
            url, named = f"http://127.0.0.1:{one.admin}{KEYS}", {"authorization": f"Bearer {TOKEN}", "if-match": "*"}
            creations = [
                timed(lambda n=n: client.post(url, headers=named, json={"id": f"new-{n}"}).raise_for_status())  # type: ignore[misc]
                for n in range(CHANGES)
            ]
            revocations = [
                timed(lambda n=n: client.post(f"{url}/new-{n}/revoke", headers=named).raise_for_status())  # type: ignore[misc]
                for n in range(CHANGES)
            ]
    return {
        "keys": count,
        "load": round(os.getloadavg()[0], 1),
        "start_s": round(first, 2),
        "start_cpu_s": round(cpu, 2),
        "start_with_copy_s": round(again, 2),
        "control_bytes": used[0],
        "worker_bytes": used[1],
        "create_ms": {"p50": share(creations, 0.5), "p99": share(creations, 0.99)},
        "revoke_ms": {"p50": share(revocations, 0.5), "p99": share(revocations, 0.99)},
    }


def on_two_gateways() -> dict[str, Any]:
    """Measure how long changes on one gateway take to be in force on another one, while requests run."""
    with postgres() as server, tempfile.TemporaryDirectory() as name:
        store = settings(server.database(), workers=1)
        with key_store.running(Path(name) / "a", store) as a, key_store.running(Path(name) / "b", store) as b:
            found = propagation(a, b, CHANGES, _RATE)
    created, revoked = ([each * 1000 for each in times] for times in (found.created, found.revoked))
    return {
        "created_ms": {"p50": share(created, 0.5), "p99": share(created, 0.99), "max": share(created, 1)},
        "revoked_ms": {"p50": share(revoked, 0.5), "p99": share(revoked, 0.99), "max": share(revoked, 1)},
        "requests": sum(one.sent for one in found.loads),
        "failed_requests": sum(one.failed + one.refused for one in found.loads),
        "requests_per_second": round(sum(one.rate for one in found.loads)),
    }


def main() -> None:
    found = [by_size(count) for count in SIZES]
    none = found[0]
    for each in found[1:]:
        for process in ("control", "worker"):
            each[f"{process}_bytes_per_key"] = round((each[f"{process}_bytes"] - none[f"{process}_bytes"]) / each["keys"])
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "cpus": psutil.cpu_count(),
        "sizes": found,
        "two_gateways": on_two_gateways(),
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    json.dump(report, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
