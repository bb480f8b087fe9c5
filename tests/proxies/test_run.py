"""A share of ``make proxies`` with each proxy: no request has another's key, no response another's client. The checks find what they are
for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.proxies import secrets
from tests.proxies.fronts import FRONTS
from tests.proxies.run import SHARING, Findings, Scenario, compare, run
from tests.proxies.traffic import KINDS, Client, hostile, ordinary

REQUESTS = 1500
DICE = random.Random(1)


@pytest.mark.parametrize(("front", "tls"), [*((name, False) for name in FRONTS), ("haproxy", True), ("nginx", True), (SHARING, False)])
def test_no_request_has_anothers_key_and_no_response_anothers_client(front: str, tls: bool, tmp_path: Path) -> None:
    missing = FRONTS[front].missing() if front in FRONTS else None
    if missing:
        pytest.skip(f"{front} is {missing}")
    found = run(Scenario(front, REQUESTS, 1, tls), tmp_path)
    assert not found.violations
    assert found.sent >= REQUESTS and found.executed > REQUESTS / 3
    assert sum(found.failed.values()) < found.sent / 50, found.failed


def _compared(owner: str, key: str | None, *, twice: bool = False) -> list[str]:
    findings = Findings(Scenario(SHARING, 1, 1))
    secret = secrets.new(DICE, owner).decode()
    compare(iter([("a", secret), ("b" if twice else "a", secret)]), {"a": key, "b": key}, findings)
    return findings.violations


@pytest.mark.parametrize(
    ("owner", "key", "twice", "violations"),
    [
        ("0007", secrets.identity(7), False, 0),
        ("0999", secrets.identity(999), False, 0),
        ("0007", secrets.identity(8), False, 2),
        ("0007", None, False, 2),
        (secrets.NO_KEY, secrets.identity(7), False, 2),
        ("0007", secrets.identity(7), True, 1),
    ],
)
def test_a_secret_under_another_key_is_found(owner: str, key: str | None, twice: bool, violations: int) -> None:
    assert len(_compared(owner, key, twice=twice)) == violations


def test_plans_depend_on_the_seed_alone_and_list_their_secrets() -> None:
    credentials = [b"Bearer %d" % number for number in range(secrets.KEYS)]
    for seed in range(len(KINDS) * 20):
        first, again = (Client(random.Random(seed), seed, credentials) for _ in range(2))
        kind, plan = hostile(first, tuple(KINDS))
        assert (kind, plan) == hostile(again, tuple(KINDS))
        owners = {secrets.owner(secret) for secret in plan.own}
        assert owners <= {f"{seed:04}"}, kind
        sent = secrets.found(b"".join([*plan.pieces, *plan.beside]))
        assert {secrets.owner(secret) for secret in sent - plan.own} <= {secrets.NO_KEY}, kind
        wire, secret = ordinary(first)
        assert secrets.found(wire) == {secret} and secrets.first(wire) == secret
