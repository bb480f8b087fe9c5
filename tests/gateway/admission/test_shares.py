"""The flows that a request belongs to, and its class, which a client may only lower."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import httpx2
import pytest

from gateway.admission.shares import QueueShares
from gateway.snapshot.snapshot import Key, QueueClass, Snapshot
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY

CLASSES = (QueueClass("chat", strict=True), QueueClass("tools", weight=3.0), QueueClass("batch", aging=30.0))


def path_of(key: Key, user: str | None = None, **given: QueueShares) -> list[tuple[str, float]]:
    flows = given.get("shares", QueueShares()).flows_of(key, user, None)
    assert flows.path[flows.key_at].name == f"key {flows.key}"
    return [(share.name, share.weight) for share in flows.path]


def test_a_key_without_a_team_is_beside_the_teams() -> None:
    assert path_of(Key("a", weight=2.0)) == [("key a", 2.0)]
    shares = QueueShares(teams={"red": 3.0})
    assert path_of(Key("a", team="red"), shares=shares) == [("team red", 3.0), ("key a", 1.0)]
    assert path_of(Key("a", team="blue"), shares=shares) == [("team blue", 1.0), ("key a", 1.0)]
    assert path_of(Key("a", team="stored", team_weight=2.0), shares=shares) == [("team stored", 2.0), ("key a", 1.0)]


def test_end_users_share_what_their_key_gets() -> None:
    assert path_of(Key("a"), "jane") == [("key a", 1.0), ("jane", 1.0)]


def test_the_subject_of_a_token_is_an_end_user_of_its_entry() -> None:
    shares = QueueShares(keys={"people": 4.0})
    assert path_of(Key("people/jane", entry="people", weight=2.0), "jane", shares=shares) == [("key people", 4.0), ("jane", 2.0)]


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        (None, None, "default"),
        ("chat", None, "chat"),
        ("removed", None, "default"),
        ("chat", "batch", "batch"),
        ("batch", "chat", "batch"),
        ("tools", "chat", "tools"),
        ("tools", "default", "default"),
        (None, "chat", "default"),
        ("chat", "unknown", "chat"),
    ],
)
def test_a_client_can_lower_its_class_and_never_raise_it(own: str | None, wanted: str | None, expected: str) -> None:
    flows = QueueShares(CLASSES).flows_of(Key("a", queue_class=own), None, wanted)
    assert (flows.class_name, flows.path[0].name) == (expected, f"class {expected}")


def test_strict_classes_come_first_and_an_aged_class_is_beside_them() -> None:
    shares = QueueShares(CLASSES)
    ranks = {name: shares.class_share(name, frozenset()).rank for name in shares.classes}
    assert ranks == {"chat": 0, "tools": 1, "batch": 1, "default": 1}
    assert shares.class_share("batch", {"batch"}).rank == 0


def test_without_classes_there_is_no_level_of_classes() -> None:
    assert QueueShares().flows_of(Key("a", queue_class="chat"), None, "batch").class_name == "default"
    assert path_of(Key("a", queue_class="chat")) == [("key a", 1.0)]


def test_the_default_class_may_be_one_of_the_configured_ones() -> None:
    shares = QueueShares((QueueClass("default", weight=2.0), QueueClass("batch")))
    assert list(shares.classes) == ["default", "batch"]
    assert shares.flows_of(Key("a"), None, "batch").class_name == "batch"


def test_a_snapshot_has_the_weights_of_teams_and_keys() -> None:
    shares = QueueShares.of(Snapshot(1, (Key("people", weight=4.0),), (), team_weights={"red": 3.0}, classes=CLASSES))
    assert [share.weight for share in shares.flows_of(Key("people/x", entry="people", team="red"), "x", None).path] == [1.0, 3.0, 4.0, 1.0]


def test_the_weight_of_a_team_of_the_store_reaches_the_queues_without_a_restart(tmp_path: Path) -> None:
    """The first half of the requests that waited is mostly of the team with the weight 4."""
    limited = launched("sim/one", **{"sim-tokens": "4", "sim-tokens-per-second": "100"}) | {"max_inflight": 1}
    limited["queue"] = {"wait": "5m"}
    with gateway(tmp_path, configuration(limited, workers=1) | {"ledger": "sqlite:///usage.db", "store": "ledger"}) as one:
        tokens = {}
        for team in ("heavy", "light"):
            assert one.command("teams", "new", "--id", team).returncode == 0
            tokens[team] = one.command("keys", "new", "--id", f"of-{team}", "--team", team).stdout.strip()
            assert send(one, tokens[team]) == 200  # the worker knows the key before the change
        assert one.command("teams", "set", "heavy", "--weight", "4").returncode == 0
        with ThreadPoolExecutor(16) as clients:
            with occupied(one):
                queued = [clients.submit(send, one, tokens[team]) for _ in range(8) for team in tokens]
                wait_for(lambda: one.metric('vllm_gateway_queued_requests{model="sim/one"}') == len(queued))
            assert [each.result() for each in queued] == [200] * len(queued)
        order = wait_for(lambda: dispatched(one, len(queued)))
    assert order[: len(queued) // 2].count("of-heavy") >= 5, order


def send(one: Gateway, token: str) -> int:
    body = {"model": "sim/one", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {token}"}
    return httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code


@contextmanager
def occupied(one: Gateway) -> Iterator[None]:
    """Use the only slot of the server by a stream, until the end of the block."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "sim/one", "stream": True, "messages": messages, "simulate": {"tokens": 2000, "tokens_per_second": 20}}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.stream("POST", f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as response:
        parts = response.iter_bytes()  # without a reference, the stream is closed
        next(parts)
        yield


def dispatched(one: Gateway, count: int) -> list[str] | None:
    """Return the keys of the requests that waited, as they were sent to the server, once the access log has all."""
    lines = [json.loads(line) for line in one.log.splitlines()]
    waited = [line for line in lines if line.get("queue_reason") == "full"]
    waited.sort(key=lambda line: datetime.fromisoformat(line["time"]).timestamp() + line["queue_ms"] / 1000)
    return [line["key"] for line in waited] if len(waited) == count else None


def test_a_class_preempts_those_after_it() -> None:
    shares = QueueShares((QueueClass("chat", preempts=True), QueueClass("tools"), QueueClass("batch", preempts=True)))
    pairs = {(one, other) for one in shares.classes for other in shares.classes if shares.may_preempt(one, other)}
    assert pairs == {("chat", "tools"), ("chat", "batch"), ("chat", "default"), ("batch", "default")}
    assert not shares.may_preempt("removed", "batch") and not shares.may_preempt("chat", "removed")
