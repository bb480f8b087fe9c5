"""Limits of end users as clients see them, with the headers that Open WebUI sends."""

from __future__ import annotations

import mmap
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from time import monotonic, time
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from gateway.api.errors import Refusal
from gateway.limits import Limiter
from gateway.limits.key_limits import PART_FOR_SUBJECTS
from gateway.limits.reservation import reservation_of
from gateway.limits.shared_counts import Buckets, BucketsFullError
from gateway.limits.user_table import UserTable
from gateway.limits.windows import moment
from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import Allowance, Budget, Key, Limits, PerUser, Snapshot
from gateway.telemetry.metrics import WorkerMetrics, sum_series
from gateway.telemetry.shared_counters import SharedCounters
from tests.gateway.limits.test_limits import USED, ratelimits, respond
from tests.support.redis_server import RedisServer, redis_of_module, server
from tests.support.running import Served, key, model, serving, shared_counters, until
from tests.support.scripted import scripted
from tests.support.wire import Reply, chat, client, request, request_once

__all__ = ["redis_of_module", "server"]

ID, NAME, EMAIL = "X-OpenWebUI-User-Id", "X-OpenWebUI-User-Name", "X-OpenWebUI-User-Email"
LIMITED, QUOTA = "rate_limit_exceeded", "insufficient_quota"


def open_webui(number: int, name: str = "Jane Doe") -> dict[str, str]:
    """Return the headers that Open WebUI sends with ENABLE_FORWARD_USER_INFO_HEADERS (`include_user_info_headers` in its
    utils/headers.py)."""
    return {
        NAME: quote(name, safe=" "),
        ID: f"7c1e0a34-5a2c-4b0e-9a43-{number:012x}",
        EMAIL: f"user{number}@example.com",
        "X-OpenWebUI-User-Role": "user",
        "X-OpenWebUI-Chat-Id": f"0b8f-{number}",
    }


def per_user(limits: Limits, owner: str = "key team-a", **users: Any) -> Allowance:
    return Allowance(f"{owner} each user", limits, users=PerUser(**users))


def of_header(*allowances: Allowance, header: str = ID, **more: Any) -> Key:
    return key(allowances=allowances, user_header=header.lower().encode(), **more)


@asynccontextmanager
async def gateway(*keys: Key, **settings: Any) -> AsyncIterator[Served]:
    async with (
        scripted(respond) as upstream,
        serving([model(upstream.port), model(upstream.port, identity="other")], keys, **settings) as one,
    ):
        yield one


async def send(served: Served, headers: dict[str, str] | None = None, token: str | None = None, **fields: Any) -> Reply:
    lines = tuple(f"{name}: {value}" for name, value in (headers or {}).items())
    data = request(chat(**fields), extra=lines) if token is None else request(chat(**fields), extra=lines, token=token)
    return await request_once(served.port, data)


async def statuses(served: Served, times: int, headers: dict[str, str] | None = None, **fields: Any) -> list[int]:
    return [(await send(served, headers, **fields)).status for _ in range(times)]


async def states(served: Served, headers: dict[str, str] | None = None, query: str = "") -> list[dict[str, Any]]:
    lines = tuple(f"{name}: {value}" for name, value in (headers or {}).items())
    reply = await request_once(served.port, request(b"", f"/v1/limits{query}", method="GET", extra=lines))
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = orjson.loads(reply.body)["limits"]
    return found


async def test_each_user_of_open_webui_has_the_limits() -> None:
    of_key = Allowance("key team-a", Limits(tokens_per_day=10_000))
    async with gateway(of_header(of_key, per_user(Limits(requests_per_minute=2, tokens_per_day=3000)))) as served:
        replies = [await send(served, open_webui(1)) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert await statuses(served, 2, open_webui(2)) == [200, 200]
        refused = replies[-1]
        assert refused.error["code"] == LIMITED and int(refused.headers["retry-after"]) <= 30
        user = "key team-a user 7c1e0a34-5a2c-4b0e-9a43-000000000001"
        assert f"limit of 2 requests per minute is reached ({user})" in str(refused.error["message"])
        assert ratelimits(replies[0]) | {"reset-requests": "", "reset-tokens-day": ""} == {
            "limit-requests": "2", "remaining-requests": "1", "reset-requests": "",
            "limit-tokens-day": "3000", "remaining-tokens-day": str(3000 - USED), "reset-tokens-day": "",
        }  # fmt: skip
        assert served.value("limited_total", "team-a", "requests_per_minute") == 1
        found = {(each["holder"], each["limit"]): each["used"] for each in await states(served, open_webui(1))}
        assert found == {
            ("key team-a", "tokens_per_day"): 4 * USED,
            (user, "requests_per_minute"): 2,
            (user, "tokens_per_day"): 2 * USED,
        }
        assert {each["used"] for each in await states(served, open_webui(3)) if "user" in each["holder"]} == {0}


@pytest.mark.parametrize("header", [ID, NAME, EMAIL])
async def test_writing_the_value_in_another_way_does_not_help(header: str) -> None:
    written = open_webui(1, "J\u00fcrgen  M\u00fcller")[header]
    others = [
        written.upper(),
        f"  {written} ",
        written.replace(" ", "   "),
        quote("Ju\u0308rgen M\u00fc\u200bller") if header == NAME else written,
    ]
    async with gateway(of_header(per_user(Limits(requests_per_minute=1)), header=header)) as served:
        assert await statuses(served, 1, {header: written}) == [200]
        assert [(await send(served, {header: other})).status for other in others] == [429] * 4


@pytest.mark.parametrize(
    ("missing", "expected"), [("shared", [200, 429, 429]), ("refused", [400, 400, 400]), ("unlimited", [200, 200, 200])]
)
async def test_a_request_without_the_value_gets_what_the_setting_says(missing: str, expected: list[int]) -> None:
    async with gateway(of_header(per_user(Limits(requests_per_minute=1), missing=missing))) as served:
        replies = [await send(served, headers) for headers in ({}, {ID: ""}, {ID: " %20 "})]
        assert [reply.status for reply in replies] == expected
        assert (await send(served, {ID: "x" * 257})).status == expected[-1], "a text that is too long names no user"
        assert (await send(served, {EMAIL: "a@b"}, user="jane")).status == expected[-1], "only the configured header counts"
        assert (await send(served, open_webui(1))).status == 200
        if missing == "refused":
            assert replies[0].error == replies[0].error | {"code": "missing_required_parameter", "param": ID.lower()}
            assert served.value("limited_total", "team-a", "end_user") == 5
            assert [each["holder"] for each in await states(served)] == ["key team-a without user"]
        if missing == "shared":
            assert "(key team-a without user)" in str(replies[1].error["message"])


async def test_the_field_of_the_body_counts_for_a_key_without_a_header() -> None:
    of_key = Allowance("key team-a", Limits(tokens_per_day=100_000, concurrent=10))
    limits = Limits(requests_per_minute=2, tokens_per_day=5000, concurrent=1)
    async with gateway(key(allowances=(of_key, per_user(limits)))) as served:
        assert await statuses(served, 3, open_webui(1), user="Jane") == [200, 200, 429], "the header is not trusted"
        assert await statuses(served, 1, user=" jane ") == [429]
        assert await statuses(served, 3, user="joe", stream=True) == [200, 200, 429]
        assert await statuses(served, 3) == [200, 200, 429]
        assert await statuses(served, 1, user=7) == [429], "it is no text, so it names no user"
        shown = {
            each["limit"]: each["used"] for each in await states(served, query="?user=JANE") if each["holder"] == "key team-a user jane"
        }
        assert shown == {"requests_per_minute": 2, "tokens_per_day": 2 * USED, "concurrent": 0}
        found = await states(served)
        assert {each["limit"]: each["used"] for each in found if each["holder"] == "key team-a"} == {
            "tokens_per_day": 6 * USED,
            "concurrent": 0,
        }, "requests that a limit has refused do not count"


async def test_a_large_body_and_extra_body_name_the_user_too() -> None:
    async with gateway(key(allowances=(per_user(Limits(requests_per_minute=1)),))) as served:
        large = [{"role": "user", "content": "a" * 300_000}]
        assert await statuses(served, 2, user="jane", messages=large) == [200, 429]
        assert await statuses(served, 1, extra_body={"user": "jane"}) == [429]


async def test_a_request_in_flight_counts_and_ends() -> None:
    async with gateway(of_header(per_user(Limits(concurrent=1)))) as served:
        async with client(served.port) as first:
            lines = tuple(f"{name}: {value}" for name, value in open_webui(1).items())
            first.send(request(chat(stream=True, messages=[{"role": "user", "content": "stay"}]), extra=lines))
            await first.events(1)
            assert await statuses(served, 1, open_webui(1)) == [429]
            assert await statuses(served, 1, open_webui(2)) == [200]
        await until(lambda: served.in_flight == 0)
        assert await statuses(served, 1, open_webui(1)) == [200]


async def test_a_hard_budget_bounds_the_response_of_a_user() -> None:
    budget = Limits(budgets=(Budget("7d", 7 * 86400.0, tokens=2000),))
    async with gateway(of_header(per_user(budget))) as served:
        reply = await send(served, open_webui(1))
        assert (reply.status, ratelimits(reply)["remaining-tokens-7d"]) == (200, str(2000 - USED))
        refused = await send(served, open_webui(1), max_tokens=1999)
        assert (refused.status, refused.error["code"]) == (429, QUOTA)
        assert await statuses(served, 1, open_webui(2), max_tokens=1500) == [200]


async def test_a_team_counts_its_users_over_its_keys() -> None:
    shared = per_user(Limits(requests_per_minute=2), "team lab")
    own = per_user(Limits(requests_per_minute=1), "key team-b")
    keys = [of_header(shared, team="lab"), replace(of_header(own, shared, team="lab"), id="team-b", digests=key("b", "sk-b").digests)]
    async with gateway(*keys) as served:
        assert await statuses(served, 1, open_webui(1)) == [200]
        assert (await send(served, open_webui(1), "sk-b")).status == 200
        refused = await send(served, open_webui(1))
        assert refused.status == 429 and "(team lab user " in str(refused.error["message"])
        assert (await send(served, open_webui(2), "sk-b")).status == 200
        assert "(key team-b user " in str((await send(served, open_webui(2), "sk-b")).error["message"])


async def test_at_the_bound_new_users_share_one_count() -> None:
    async with gateway(of_header(per_user(Limits(requests_per_minute=2), max_users=3))) as served:
        for number in range(3):
            assert await statuses(served, 1, open_webui(number)) == [200]
        assert served.value("limited_users_overflow_total", "key team-a") == 0
        assert [(await send(served, open_webui(number))).status for number in range(3, 8)] == [200, 200, 429, 429, 429]
        assert served.value("limited_users_overflow_total", "key team-a") == 5
        assert [(await send(served, open_webui(number))).status for number in range(3)] == [200] * 3, "users with use keep their own"
        (state,) = await states(served, open_webui(9))
        assert (state["holder"], state["used"]) == ("key team-a other users", 2)
        assert served.value("limited_users_overflow_total", "key team-a") == 5, "a report is no request"


async def test_a_reload_keeps_the_use() -> None:
    async with gateway(of_header(per_user(Limits(tokens_per_day=2000)))) as served:
        assert await statuses(served, 2, open_webui(1)) == [200, 200]
        lower = of_header(per_user(Limits(tokens_per_day=1500)))
        served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, keys=(lower,)))
        (state,) = await states(served, open_webui(1))
        assert (state["amount"], state["used"]) == (1500, 2 * USED)


@pytest.mark.parametrize("by_header", [True, False], ids=["header", "field"])
async def test_with_a_store(server: RedisServer, by_header: bool) -> None:
    limits = per_user(Limits(requests_per_minute=2, tokens_per_day=4000))
    one = of_header(limits) if by_header else key(allowances=(limits,))

    def of(number: int) -> dict[str, Any]:
        return {"headers": open_webui(number)} if by_header else {"user": open_webui(number)[ID]}

    async with gateway(one, limits_store=server.store_config()) as first, gateway(one, limits_store=server.store_config()) as second:
        assert [(await send(each, **of(1))).status for each in (first, second, first, second)] == [200, 200, 429, 429]
        assert [(await send(each, **of(2))).status for each in (second, first, second)] == [200, 200, 429]
        query = "" if by_header else f"?user={open_webui(1)[ID]}"
        found = await states(first, open_webui(1) if by_header else None, query)
        assert {each["limit"]: each["used"] for each in found} == {"requests_per_minute": 2, "tokens_per_day": 2 * USED}


async def test_the_bound_holds_with_a_store_too(server: RedisServer) -> None:
    one = of_header(per_user(Limits(requests_per_minute=2, tokens_per_day=4000), max_users=2))
    async with gateway(one, limits_store=server.store_config()) as served:
        assert [(await send(served, open_webui(number))).status for number in range(5)] == [200] * 4 + [429]
        assert served.value("limited_users_overflow_total", "key team-a") == 3
        assert len(list(server.client().scan_iter("vllm-gateway:key team-a *"))) == 3


async def test_without_the_store_each_gateway_counts_its_users(server: RedisServer) -> None:
    one = of_header(per_user(Limits(requests_per_minute=2)))
    async with gateway(one, limits_store=server.store_config(timeout=1.0)) as served:
        assert await statuses(served, 1, open_webui(1)) == [200]
        server.stop()
        await until(lambda: served.context.limiter.store is not None and served.context.limiter.store._open_connection is None)
        assert await statuses(served, 3, open_webui(1)) == [200, 200, 429]
        server.start()


# One worker without sockets


@contextmanager
def limiter(*keys: Key, buckets: Buckets | None = None, **settings: Any) -> Iterator[tuple[Limiter, SharedCounters]]:
    with shared_counters() as counters, closing(buckets or Buckets.private()) as memory:
        made = Limiter(WorkerMetrics(counters), memory, lambda _: None)
        made.apply_snapshot(Snapshot(1, keys, (), **settings))
        yield made, counters


def admitted(one: Limiter, by: Key, users: Sequence[str], header: bytes = b"x-openwebui-user-id") -> list[str | None]:
    """Send requests of these end users and return the code of each refusal; None for an admitted request."""
    found: list[str | None] = []
    for number, user in enumerate(users):
        try:
            assert reservation_of(one, by, f"req_{by.id}_{number}", {header: user.encode()}).reserve_request() is None
            found.append(None)
        except Refusal as refusal:
            found.append(refusal.code)
    return found


def test_the_subject_of_a_token_is_its_end_user() -> None:
    shared, own = per_user(Limits(requests_per_minute=2), "team lab"), per_user(Limits(requests_per_minute=1), "key staff")
    entry = Key("staff", team="lab", allowances=(own, shared))
    with limiter(entry) as (one, _):
        alice = replace(entry, id="staff/alice", entry="staff")
        assert admitted(one, alice, ["x", "y"]) == [None, LIMITED], "a header names no other user"
        assert admitted(one, replace(alice, id="staff/bob"), ["x", "y"]) == [None, LIMITED]
        assert [name for name, _ in _holders(one, alice)] == ["key staff user staff%2Falice", "team lab user staff%2Falice"]


def _holders(one: Limiter, by: Key, user: str = "") -> list[tuple[str, Limits]]:
    return [(holder.name, holder.limits) for _, holder in one.limits_of(by, {b"x-openwebui-user-id": user.encode()}).holders]


def test_a_subject_without_memory_shares_the_counts_of_its_entry_for_further_end_users() -> None:
    entry, memory = Key("staff", allowances=(per_user(Limits(requests_per_minute=1), "key staff"),)), mmap.mmap(-1, 4096)
    struct.pack_into("<QQ", memory, 0, 1, 0)
    with limiter(entry, buckets=Buckets(memory)) as (one, _):
        with suppress(BucketsFullError):
            for number in range(4096):
                one.buckets.holder(f"key {number}", Limits(), PART_FOR_SUBJECTS)
        alice = replace(entry, id="staff/alice", entry="staff")
        assert admitted(one, replace(alice, entry="removed"), ["x"]) == ["overloaded"]
        assert admitted(one, alice, ["x"]) + admitted(one, replace(alice, id="staff/bob"), ["x"]) == [None, LIMITED]
        assert [name for name, _ in _holders(one, alice)] == ["key staff other users"]


def test_keys_of_the_store_have_users_too() -> None:
    stored = of_header(per_user(Limits(concurrent=1)))
    with limiter() as (one, _):
        one.apply_stored_keys(StoredKeys((stored,)))
        assert admitted(one, stored, ["a", "b", "a"]) == [None, None, LIMITED]
        raised = replace(stored, allowances=(per_user(Limits(concurrent=2)),))
        one.apply_stored_keys(StoredKeys((raised,)))
        assert admitted(one, raised, ["a", "a"]) == [None, LIMITED]


def test_what_a_worker_remembers_of_users_is_bounded() -> None:
    by = of_header(per_user(Limits(requests_per_minute=1)))
    with limiter(by) as (one, counters):
        users = [f"u{number}" for number in range(5000)]
        assert admitted(one, by, users) == [None] * 5000
        assert len(one.end_users._known) <= 4096
        assert admitted(one, by, users) == [LIMITED] * 5000
        assert not [s for s, v in sum_series([counters]).items() if "u17" in s.labels], "no label comes from a request"


@pytest.mark.parametrize(("most", "name"), [(1, "key team-a other users"), (2, "key team-a user jane")])
def test_counts_that_moved_are_found_again(most: int, name: str) -> None:
    limits = per_user(Limits(requests_per_minute=2), max_users=most)
    by = of_header(Allowance("key team-a", Limits(requests_per_minute=100)), limits)
    with limiter(by) as (one, _):
        before = one.limits_of(by, {b"x-openwebui-user-id": b"jane"})
        other, later = UserTable(one.buckets, limits, 1.0), moment(monotonic() + 2, time())
        joe = UserTable(one.buckets, replace(limits, users=PerUser(max_users=1)), 1.0).allocate("joe", later)
        assert joe is not None and joe.offset in {each.offset for each in before.for_all_models}
        assert admitted(one, by, ["jane", "jane", "jane"]) == [None, None, LIMITED]
        reservation = reservation_of(one, by, "req", {b"x-openwebui-user-id": b"jane"})
        assert [each.name for each in reservation.shown_holders] == ["key team-a", name]
        assert other.allocate("joe", later) == joe and one.buckets.rates(joe).requests_full == 0, "nothing counted for the other user"


@pytest.mark.parametrize(("of_key", "of_team"), [(1, 2), (2, 1)])
def test_an_end_user_gets_its_own_counts_once_some_are_free(of_key: int, of_team: int) -> None:
    limits, own = Limits(requests_per_minute=1), ("key team-a user", "team lab user")
    shared = tuple(each.removesuffix("user") + "other users" for each in own)
    by = of_header(per_user(limits, max_users=of_key), per_user(limits, "team lab", max_users=of_team), team="lab")
    with limiter(by) as (one, _):
        assert [name for name, _ in _holders(one, by, "jane")] == [f"{each} jane" for each in own]
        assert [name for name, _ in _holders(one, by, "joe")] == [
            f"{name} joe" if most == 2 else other for name, other, most in zip(own, shared, (of_key, of_team), strict=True)
        ]
        assert [name for name, _ in _holders(one, by, "ann")] == [*shared], "not the counts of another one at the bound"
        for name in ("jane", "ann"):  # remembered: by itself, and with the others at the bound
            fields = {b"x-openwebui-user-id": name.encode()}
            assert one.limits_of(by, fields) is one.limits_of(by, fields)
        for holder in (holder for _, holder in one.limits_of(by, {b"x-openwebui-user-id": b"jane"}).holders):
            one.buckets.cells[one.buckets.number_cell(holder) + 1] = 0.0  # they are no longer held for it
        assert [name for name, _ in _holders(one, by, "ann")] == [f"{each} ann" for each in own]


@pytest.mark.parametrize(
    ("header", "named", "message"),
    [
        (None, "user", "The field 'user' must name the end user."),
        (b"x-user", "x-user", "The header 'x-user' must name the end user."),
    ],
)
def test_a_refusal_says_what_must_name_the_end_user(header: bytes | None, named: str, message: str) -> None:
    by = key(allowances=(per_user(Limits(requests_per_minute=5), missing="refused"),), user_header=header)
    with limiter(by) as (one, _), pytest.raises(Refusal) as raised:
        one.end_users.with_body(one.limits_of(by, {}), None)
    assert (raised.value.code, raised.value.param, str(raised.value)) == ("missing_required_parameter", named, message)


def test_a_request_without_a_key_is_refused_where_end_users_must_be_named() -> None:
    of_team = per_user(Limits(requests_per_minute=5), "team a", missing="refused")
    anonymous = key(allowances=(of_team,), anonymous=True)
    with limiter(anonymous) as (one, _), pytest.raises(Refusal, match="names no end user") as raised:
        reservation_of(one, anonymous, "req", {})
    assert raised.value.code == "missing_required_parameter"
