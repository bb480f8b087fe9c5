"""A key and its operator see the state of limits, equal to headers and refusals, on each worker and with a store."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from gateway.limits.states import HolderRates, LimitState, limit_states
from gateway.limits.windows import BudgetState, NamedBudget
from gateway.snapshot.snapshot import Allowance, Limits, Raised
from tests.support.described import response_problems
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.redis_server import redis_server
from tests.support.running import KEY

FREE = "sk-a-key-without-limits"
KEY_LIMITS = {
    "requests_per_minute": 1000,
    "tokens_per_minute": 500_000,
    "tokens_per_day": 10_000,
    "concurrent": 5,
    "max_tokens": 64,
    "models": [{"models": ["sim/*"], "tokens_per_month": 200_000}],
}
TEAM_LIMITS = {"cost_per_month": 0.5, "session": {"tokens": 5000}}


@pytest.fixture(scope="module", params=["memory", "redis"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    model = launched("sim/one", **{"sim-tokens-per-second": 0}) | {"price": {"prompt": 0.5, "completion": 1.5}}
    config = configuration(model, workers=2) | {"teams": [{"id": "lab", "limits": TEAM_LIMITS}]}
    config["keys"][0] |= {"team": "lab", "limits": KEY_LIMITS}
    config["keys"].append({"id": "free", "hash": keys.hash_of(FREE)})
    with ExitStack() as stack:
        if request.param == "redis":
            config["limits_store"] = stack.enter_context(redis_server()).url
            config["limits"] = {"on_store_failure": "refuse"}  # a late reply of the store is seen, and no worker counts alone
        yield stack.enter_context(gateway(tmp_path_factory.mktemp("limits"), config))


def counted(send: Callable[[], httpx2.Response]) -> httpx2.Response:
    """Send a request until the store replies in time. Return the response."""

    def reply() -> httpx2.Response | None:
        response = send()
        return None if "can't be counted at the moment" in response.text else response

    found: httpx2.Response = wait_for(reply, 60.0)
    return found


def limits(one: Gateway, token: str = KEY) -> httpx2.Response:
    headers = {"authorization": f"Bearer {token}"}
    reply = counted(lambda: httpx2.get(f"{one.url}/v1/limits", headers=headers, timeout=60, verify=False))
    assert reply.status_code == 200, reply.text
    assert response_problems("/v1/limits", 200, "application/json", reply.text, "get") == []
    return reply


def by_name(states: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["limit"]: each for each in states}


def tokens_of_day(one: Gateway) -> int:
    """Return the tokens that are used of the day."""
    used: int = by_name(limits(one).json()["limits"])["tokens_per_day"]["used"]
    return used


def use(one: Gateway) -> list[dict[str, int]]:
    """Send six requests, wait until their tokens are settled, and return their usage."""
    before = tokens_of_day(one)
    usages = [counted(lambda: one.request(max_tokens=20)).json()["usage"] for _ in range(6)]
    settled = before + sum(usage["total_tokens"] for usage in usages)
    wait_for(lambda: tokens_of_day(one) == settled)
    return usages


def test_a_key_sees_what_headers_and_refusals_say(one: Gateway) -> None:
    before = by_name(limits(one).json()["limits"])
    usages = use(one)
    tokens = sum(each["total_tokens"] for each in usages)
    cost = sum(each["prompt_tokens"] * 500 + each["completion_tokens"] * 1500 for each in usages)
    known = limits(one)
    states = by_name(known.json()["limits"])
    assert (known.json()["key"], known.json()["team"]) == ("team-a", "lab")
    for name in ("tokens_per_day", "tokens_per_month"):
        assert states[name]["used"] - before[name]["used"] == tokens
        assert states[name]["remaining"] == states[name]["amount"] - states[name]["used"]
    assert round((states["cost_per_month"]["used"] - before["cost_per_month"]["used"]) * 10**9) == cost
    assert states["tokens_per_day"]["holder"] == "key team-a" and states["cost_per_month"]["holder"] == "team lab"
    assert states["tokens_per_month"]["models"] == ["sim/*"] and states["tokens_per_day"]["models"] is None
    assert (states["max_tokens"]["amount"], states["max_tokens"]["used"]) == (64, None)
    assert (states["tokens_per_session"]["amount"], states["tokens_per_session"]["used"]) == (5000, None)
    assert states["requests_per_minute"]["remaining"] <= 1000 and states["tokens_per_minute"]["remaining"] <= 500_000
    assert 0 < states["tokens_per_day"]["reset_seconds"] <= 86400
    assert by_name(limits(one).json()["limits"])["tokens_per_day"]["used"] == states["tokens_per_day"]["used"], "it counts for nothing"
    last = counted(lambda: one.request(max_tokens=20))
    total = last.json()["usage"]["total_tokens"]
    assert int(last.headers["x-ratelimit-remaining-tokens-day"]) <= states["tokens_per_day"]["remaining"] - total
    wait_for(lambda: tokens_of_day(one) == states["tokens_per_day"]["used"] + total)
    states = by_name(limits(one).json()["limits"])
    too_large = [{"role": "user", "content": "x" * 39_600}]
    refusal = counted(lambda: one.request(messages=too_large, max_tokens=20)).json()["error"]["message"]
    assert f"only {states['tokens_per_day']['remaining']:,} are left (key team-a)" in refusal


def test_every_worker_shows_the_same(one: Gateway) -> None:
    use(one)
    assert len({tokens_of_day(one) for _ in range(20)}) == 1


def test_requests_in_flight_are_shown(one: Gateway) -> None:
    in_memory = by_name(limits(one).json()["limits"])["concurrent"]["used"] is not None
    if not in_memory:
        return  # a store counts them, and does not report them
    body = {"model": "sim/one", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 50}
    slow = body | {"simulate": {"tokens": 10_000, "tokens_per_second": 20}}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.stream("POST", f"{one.url}/v1/chat/completions", json=slow, headers=headers, timeout=60, verify=False) as reply:
        events = reply.iter_bytes()  # the connection closes with the iterator
        assert next(events)
        state = by_name(limits(one).json()["limits"])["concurrent"]
        assert (state["used"], state["remaining"], state["reset_seconds"]) == (1, 4, None)


def test_a_key_without_limits_has_an_empty_list_and_an_unknown_key_an_error(one: Gateway) -> None:
    assert limits(one, FREE).json() == {"key": "free", "team": None, "limits": []}
    assert httpx2.get(f"{one.url}/v1/limits", verify=False).status_code == 401


def test_operators_see_the_same_by_command_and_admin_port(one: Gateway) -> None:
    use(one)
    own = by_name(limits(one).json()["limits"])
    budgets = ("tokens_per_day", "tokens_per_month", "cost_per_month")

    def shown() -> dict[str, dict[str, Any]]:
        return by_name(one.get("/limits?key=team-a").json()["limits"])

    wait_for(lambda: {name: shown()[name]["used"] for name in budgets} == {name: own[name]["used"] for name in budgets})
    assert set(shown()) == set(own)
    assert {each["holder"] for each in one.get("/limits?team=lab").json()["limits"]} == {"team lab"}
    assert one.get("/limits?key=nobody").status_code == one.get("/limits?model=sim/one").status_code == 400
    table = one.command("limits")
    assert table.returncode == 0 and "team lab" in table.stdout and "cost_per_month" in table.stdout
    rows = list(csv.DictReader(io.StringIO(one.command("limits", "--key", "team-a", "--format", "csv").stdout)))
    assert {row["limit"]: row["amount"] for row in rows}["cost_per_month"] == "0.5"
    document = json.loads(one.command("limits", "--format", "json").stdout)
    assert by_name(document["limits"])["tokens_per_month"]["models"] == ["sim/*"]
    assert one.command("limits", "--key", "free").stdout == "no limits\n"
    assert one.command("limits", "--key", "nobody").returncode == 1
    assert one.command("limits", "--format", "xml").returncode == 2


def test_the_closest_limits_come_first(one: Gateway) -> None:
    use(one)
    names = {"tokens_per_day", "tokens_per_month", "cost_per_month"}  # what is used per minute is soon available again
    wait_for(lambda: {each["limit"] for each in one.get("/limits?closest=99").json()["limits"]} >= names)
    found = one.get("/limits?closest=2").json()["limits"]
    assert len(found) == 2 and all(each["used"] > 0 for each in found)
    shares = [each["used"] / each["amount"] for each in found]
    assert found[0]["limit"] == "tokens_per_day" and shares == sorted(shares, reverse=True)
    assert [one.get(f"/limits?{query}").status_code for query in ("closest=x", "closest=1&key=team-a", "closest=")] == [400] * 3


def test_a_cost_is_shown_with_all_of_its_digits() -> None:
    allowance = Allowance("key a for m*", Limits(requests_per_minute=60, cost_per_month=5_000_000_000), ("m*",))
    budget = BudgetState(NamedBudget("cost_per_month", 5_000_000_000, True, False), "month", 4_999_999_999.0, 12.3456)
    first, second = limit_states(allowance, HolderRates(90.0, 0.0, 0), [budget], 60.0)
    assert (first.holder, first.used, first.remaining, first.reset) == ("key a", 30, 30, 30.0)
    shown = second.document()
    assert [bytes(shown[name]) for name in ("amount", "used", "remaining")] == [b"5", b"4.999999999", b"0.000000001"]
    assert (shown["holder"], shown["models"], shown["reset_seconds"]) == ("key a", ("m*",), 12.346)


@pytest.mark.parametrize(
    ("rates", "used", "left"), [(HolderRates(0.0, 0.0, 2), 2, 3), (HolderRates(0.0, 0.0, 7), 7, 0), (None, None, None)]
)
def test_concurrent_requests_are_shown(rates: HolderRates | None, used: int | None, left: int | None) -> None:
    (shown,) = limit_states(Allowance("key a", Limits(concurrent=5)), rates, [], 0.0)
    assert (shown.limit, shown.amount, shown.used, shown.remaining, shown.soft) == ("concurrent", 5, used, left, False)


def test_a_limit_without_known_counts_is_shown_without_use() -> None:
    limits = Limits(requests_per_minute=60, tokens_per_month=7, cost_per_day=10**9)
    shown = [each.document() for each in limit_states(Allowance("key a", limits), None, None, 0.0)]
    assert [each["limit"] for each in shown] == ["requests_per_minute", "cost_per_day", "tokens_per_month"]
    assert {(each["used"], each["remaining"], each["reset_seconds"]) for each in shown} == {(None, None, None)}


def test_only_the_hard_limit_of_a_raise_is_shown_as_raised() -> None:
    raised = Raised("tokens_per_day", 7, 1e9)
    limits, used = Limits(requests_per_minute=60, raised=(raised,)), 3.0
    budgets = [BudgetState(NamedBudget("tokens_per_day", 10, False, is_soft), "day", used, 1.0) for is_soft in (False, True)]
    shown = list(limit_states(Allowance("key a", limits), HolderRates(0.0, 0.0, 0), budgets, 0.0))
    assert [(each.limit, each.soft, each.raised) for each in shown] == [
        ("requests_per_minute", False, None),
        ("tokens_per_day", False, raised),
        ("tokens_per_day", True, None),
    ]
    document = shown[1].document()
    assert (document["configured"], document["raised_until"]) == (7, "2001-09-09T01:46:40Z")
    assert "configured" not in shown[2].document()


@pytest.mark.parametrize(("amount", "used", "share"), [(10, 5, 0.5), (10, None, 0.0), (0, 1, 1.0), (0, 0, 0.0)])
def test_the_used_share_of_a_limit(amount: int, used: int | None, share: float) -> None:
    assert LimitState("key a", None, "tokens_per_day", amount, used).share == share
