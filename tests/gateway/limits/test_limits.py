"""Limits as clients see them, in one worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import orjson
import pytest

from gateway.api.errors import duration
from gateway.limits import decision, windows
from gateway.snapshot.snapshot import Allowance, Budget, Key, Limits, Snapshot
from tests.support.money import price
from tests.support.ports import refusing
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, COUNT, DONE, HELLO, ROLE, STOP, Reply, chat, client, request, request_once

USED = 5
"""Tokens in the `usage` of a response of these servers."""


async def respond(talk: Conversation) -> None:
    """Send the response that the prompt names."""
    prompt_text = str(talk.request.json.get("messages", talk.request.json.get("prompt")))
    if "fail" in prompt_text:
        await talk.respond(b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}', "400 Bad Request")
    elif "stay" in prompt_text:
        await talk.begin_stream()
        for each in (ROLE, HELLO, HELLO):
            await talk.chunk(each)
            await asyncio.sleep(0.05)
        await talk.closed_by_peer()
    elif talk.request.json.get("stream"):
        await talk.begin_stream()
        for each in (ROLE, HELLO, STOP, COUNT, DONE):
            await talk.chunk(each)
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


def limited(identity: str = "team-a", token: str = KEY, *more: Allowance, **limits: Any) -> Key:
    return key(identity, token, allowances=(Allowance(f"key {identity}", Limits(**limits)), *more))


@asynccontextmanager
async def gateway(*keys: Key, **more: Any) -> AsyncIterator[tuple[Served, Scripted]]:
    async with scripted(respond) as server, serving([model(server.port, **more), model(server.port, identity="other")], keys) as served:
        yield served, server


def prompt(text: str, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}], **fields)


async def statuses(served: Served, times: int, data: bytes) -> list[int]:
    return [(await request_once(served.port, data)).status for _ in range(times)]


def limited_total(served: Served, reason: str, identity: str = "team-a") -> float:
    return served.value("limited_total", identity, reason)


@dataclass(frozen=True)
class Counted:
    """Usage of a holder today and this month, and its requests in flight."""

    day: float
    day_cost: float
    month: float
    in_flight: float


def counted(served: Served, holder: str = "key team-a") -> Counted:
    buckets = served.context.limiter.buckets
    found = buckets.holder(holder, Limits())
    cells = buckets.cells[found.offset : found.offset + decision.SIZE]
    return Counted(
        cells[decision.DAY + windows.USED],
        cells[decision.DAY + windows.SPENT],
        cells[decision.MONTH + windows.USED],
        buckets.in_flight(found),
    )


def ratelimits(reply: Reply) -> dict[str, str]:
    return {name.removeprefix("x-ratelimit-"): value for name, value in reply.headers.items() if name.startswith("x-ratelimit-")}


async def test_requests_per_minute() -> None:
    async with gateway(limited(requests_per_minute=3)) as (served, server):
        began = monotonic()
        replies = [await request_once(served.port, request(chat())) for _ in range(5)]
        passed = monotonic() - began
        assert [reply.status for reply in replies] == [200, 200, 200, 429, 429]
        assert [ratelimits(reply)["remaining-requests"] for reply in replies] == ["2", "1", "0", "0", "0"]
        assert ratelimits(replies[0]).keys() == {"limit-requests", "remaining-requests", "reset-requests"}
        wait = int(replies[3].headers["retry-after"])
        assert replies[3].error["code"] == "rate_limit_exceeded" and 20 - passed <= wait <= 20
        assert (
            replies[3].error["message"]
            == f"The limit of 3 requests per minute is reached (key team-a). Try again in {duration(int(wait))}."
        )
        assert (limited_total(served, "requests_per_minute"), len(server.requests)) == (2, 3)


@pytest.mark.parametrize(
    ("limits", "body"), [(Limits(requests_per_minute=30), chat()), (Limits(tokens_per_minute=60), chat(max_tokens=30))]
)
async def test_a_client_that_waits_for_retry_after_is_admitted(limits: Limits, body: dict[str, object]) -> None:
    data = request(body)
    async with gateway(key(allowances=(Allowance("key team-a", limits),))) as (served, _):
        while (reply := await request_once(served.port, data)).status == 200:
            pass
        assert reply.status == 429
        await asyncio.sleep(int(reply.headers["retry-after"]))
        assert (await request_once(served.port, data)).status == 200


async def test_a_refusal_comes_before_the_body() -> None:
    async with gateway(limited(requests_per_minute=1)) as (served, _):
        await request_once(served.port, request(chat()))
        async with client(served.port) as visitor:
            visitor.send(request(b"", extra=("x-note: the body never comes",)).replace(b"content-length: 0", b"content-length: 1000"))
            reply = await visitor.reply()
        assert reply.status == 429 and reply.error["code"] == "rate_limit_exceeded"


async def test_tokens_are_reserved_and_settled() -> None:
    async with gateway(limited(tokens_per_minute=60)) as (served, _):  # one token is refilled each second, so time changes little
        began = monotonic()
        reply = await request_once(served.port, request(chat(max_tokens=20)))
        assert int(ratelimits(reply)["remaining-tokens"]) >= 60 - USED, "a whole answer tells what is left behind it"
        reply = await request_once(served.port, request(chat(max_tokens=20)))
        assert int(ratelimits(reply)["remaining-tokens"]) >= 60 - 2 * USED
        reply = await request_once(served.port, request(chat(max_tokens=100_000)))
        assert reply.status == 429, "more than all of it waits until it is untouched"
        assert 2 * USED - (monotonic() - began) <= int(reply.headers["retry-after"]) <= 2 * USED
        assert limited_total(served, "tokens_per_minute") == 1


async def test_a_day_is_counted_by_usage_alone() -> None:
    async with gateway(limited(tokens_per_day=1200, tokens_per_month=100_000)) as (served, _):
        assert await statuses(served, 20, request(chat(max_tokens=1000))) == [200] * 20
        assert await statuses(served, 2, request(chat(max_tokens=1000, stream=True))) == [200] * 2
        assert (counted(served).day, counted(served).month) == (22 * USED, 22 * USED)
        reply = await request_once(served.port, request(chat(max_tokens=1100)))
        assert reply.status == 429 and reply.error["code"] == "insufficient_quota"
        assert 0 < int(reply.headers["retry-after"]) <= 86400 and reply.headers["x-should-retry"] == "false"
        headers = ratelimits(reply)
        assert (headers["limit-tokens-day"], headers["remaining-tokens-day"]) == ("1200", str(1200 - 22 * USED))
        assert f"only {headers['remaining-tokens-day'][0]},{headers['remaining-tokens-day'][1:]} are left" in str(reply.error["message"])
        assert headers["remaining-tokens-month"] == str(100_000 - 22 * USED)
        assert limited_total(served, "tokens_per_day") == 1


async def test_a_budget_that_is_nearly_used_has_a_warning() -> None:
    async with gateway(limited(tokens_per_week=200, tokens_per_month=100_000)) as (served, _):
        replies = [await request_once(served.port, request(chat(max_tokens=1))) for _ in range(35)]
        remaining = [int(ratelimits(reply)["remaining-tokens-week"]) for reply in replies if reply.status == 200]
        assert remaining == [200 - USED * number for number in range(1, len(remaining) + 1)]
        warnings = [reply.headers.get("x-vllm-gateway-budget-warning") for reply in replies][: len(remaining)]
        expected = [f"tokens_per_week;used={1 - left / 200:.4f}"[:-2] if left <= 40 else None for left in remaining]
        assert warnings == expected and any(expected)


async def test_a_rolling_budget_is_in_the_headers_and_refuses() -> None:
    budget = Budget("7d", 7 * 86400, tokens=100)
    async with gateway(limited(budgets=(budget,))) as (served, _):
        assert await statuses(served, 1, request(chat(max_tokens=1))) == [200]
        replies = [await request_once(served.port, request(chat(max_tokens=60))) for _ in range(14)]
        assert {reply.status for reply in replies} == {200, 429}
        refused = next(reply for reply in replies if reply.status == 429)
        left = int(ratelimits(refused)["remaining-tokens-7d"])
        assert 0 < left < 100 and f"of the limit of 100 tokens per 7d only {left} are left (key team-a)" in str(refused.error["message"])
        assert refused.error["code"] == "insufficient_quota" and 6.9 * 86400 < int(refused.headers["retry-after"]) <= 7.3 * 86400
        assert limited_total(served, "tokens_per_7d") >= 1


async def test_a_soft_budget_warns_and_refuses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway(limited(budgets=(Budget("month", tokens=2 * USED, soft=True),))) as (served, _):
        replies = [await request_once(served.port, request(chat(max_tokens=1))) for _ in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        assert [reply.headers.get("x-vllm-gateway-budget-warning") for reply in replies] == [
            *(None, "tokens_per_month;used=1.00;soft", "tokens_per_month;used=1.50;soft", "tokens_per_month;used=2.00;soft")
        ]
        assert ratelimits(replies[0]) == {}
        exceeded = [record.message for record in caplog.records if "soft budget" in record.message]
        assert exceeded == ["the soft budget of 10 tokens per month is exceeded (key team-a)"]


async def test_a_soft_budget_is_reported_again_after_it_was_within_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget("month", tokens=10, soft=True)
    async with gateway(limited(budgets=(budget,))) as (served, _):
        limiter = served.context.limiter
        holder = limiter.buckets.holder("key team-a", Limits(budgets=(budget,)))
        for used in (11, 12, 10, 11):
            (month,) = windows.windows_of(holder.limits)
            limiter.report_soft_budgets((holder, state) for state in windows.states_of(month, used, 0, 60.0))
    assert [record.message for record in caplog.records if "soft budget" in record.message] == [
        "the soft budget of 10 tokens per month is exceeded (key team-a)"
    ] * 2


async def test_a_bounded_number_of_exceeded_soft_budgets_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "vllm_gateway.limits")
    async with gateway(limited()) as (served, _):
        limits = Limits(budgets=(Budget("month", tokens=10, soft=True),))
        (state,) = windows.states_of(windows.windows_of(limits)[0], 11, 0, 60.0)
        limiter = served.context.limiter
        for number in range(10_001):
            limiter.report_soft_budgets([(decision.Holder.placed(f"key staff/{number}", limits, 0, {"month": 0}), state)])
        assert len(limiter._exceeded) <= 10_000


@pytest.mark.parametrize("fields", [{"max_tokens": number} for number in (5000, 5000.0, "5000", " 5_000 ")] + [{"n": 5}, {"n": 5.0}])
async def test_a_number_in_another_type_reserves_the_same_tokens(fields: dict[str, Any]) -> None:
    async with gateway(limited(tokens_per_day=8000)) as (served, server):
        async with client(served.port) as first:
            first.send(request(prompt("stay", stream=True, **fields)))
            await first.reader.readuntil(HELLO)
            assert await statuses(served, 1, request(prompt("more", **fields))) == [429]
        await until(lambda: served.in_flight == 0)
        assert [each.head.split()[1] for each in server.requests][:1] == [b"/v1/chat/completions"]
        assert all(b"/v1/chat/completions HTTP" not in each.head for each in server.requests[1:]), "only counts of the first one's prompt"


def message_without_wait(reply: Reply) -> str:
    """Return the message of a refusal without the time to wait."""
    assert reply.status == 429
    message, separator, wait = str(reply.error["message"]).lower().rpartition("try again in ")
    if "retry-after" not in reply.headers:
        assert not separator
        return str(reply.error["message"])
    assert wait == f"{duration(int(reply.headers['retry-after']))}."
    return str(reply.error["message"])[: len(message)].rstrip()


async def test_a_refusal_reports_what_is_left_and_what_was_requested() -> None:
    """Do not report a limit as reached if a shorter response fits into it."""
    async with gateway(limited(tokens_per_day=200)) as (served, _):
        assert await statuses(served, 6, request(chat(max_tokens=1))) == [200] * 6
        guess, day = len(orjson.dumps(chat())) // 4, "of the limit of 200 tokens per day only 170 are left (key team-a)."
        reply = await request_once(served.port, request(chat(max_tokens=160)))
        guess = len(orjson.dumps(chat(max_tokens=160))) // 4
        fits = f"Set 'max_tokens' to at most {170 - guess}, or"
        assert message_without_wait(reply) == f"This request reserves {guess + 160} tokens, and {day} {fits}"
        assert reply.error["code"] == "insufficient_quota" and reply.headers["x-should-retry"] == "false"
        assert await statuses(served, 1, request(chat(max_tokens=170 - guess))) == [200], "it fits as was said"
        day = day.replace("170", "165")
        long = prompt("a" * 620, max_tokens=1)
        guess = len(orjson.dumps(long)) // 4
        assert (
            message_without_wait(await request_once(served.port, request(long))) == f"This request reserves {guess + 1} tokens, and {day}"
        )
        offset = served.context.limiter.buckets.holder("key team-a", Limits()).offset
        served.context.limiter.buckets.cells[offset + decision.DAY + windows.USED] = 200
        assert (
            message_without_wait(await request_once(served.port, request(chat(max_tokens=1))))
            == "The limit of 200 tokens per day is reached (key team-a)."
        )


async def test_a_request_larger_than_the_limit_gets_no_retry_after() -> None:
    async with gateway(limited(tokens_per_day=20_000)) as (served, _):
        assert await statuses(served, 1, request(chat(max_tokens=1))) == [200]
        body = chat(max_tokens=32_000)
        reply = await request_once(served.port, request(body))
        guess = len(orjson.dumps(body)) // 4
        assert reply.status == 429 and reply.error["code"] == "insufficient_quota"
        assert reply.error["message"] == (
            f"This request reserves {32_000 + guess:,} tokens, more than the whole limit of 20,000 tokens per day (key team-a). "
            f"Set 'max_tokens' to at most {20_000 - USED - guess:,}."
        )
        assert "retry-after" not in reply.headers and reply.headers["x-should-retry"] == "false"


async def test_refusals_by_a_minute_and_by_a_cost() -> None:
    async with gateway(limited(tokens_per_minute=2000, cost_per_month=500_000_000), price=price(0.0, 1000.0)) as (served, _):
        assert await statuses(served, 1, request(chat(max_tokens=1))) == [200]
        assert message_without_wait(await request_once(served.port, request(chat(max_tokens=499)))) == (
            "This request reserves a cost of 0.499, and of the limit of a cost of 0.5 per month only 0.498 is left (key team-a)."
            " Set 'max_tokens' to at most 498, or"
        )
    async with gateway(limited(tokens_per_minute=20_000_000)) as (served, _):
        async with client(served.port) as first:
            first.send(request(prompt("stay", stream=True, max_tokens=12_000_000)))
            await first.reader.readuntil(HELLO)
            message = message_without_wait(await request_once(served.port, request(chat(max_tokens=12_000_000))))
            assert " and of the limit of 20,000,000 tokens per minute only 8" in message and message.endswith(", or")
        await until(lambda: served.in_flight == 0)


async def test_costs_are_tokens_by_price() -> None:
    async with gateway(limited(cost_per_day=10_000_000), price=price(1000.0, 1000.0)) as (served, _):
        assert await statuses(served, 3, request(chat(max_tokens=1))) == [200, 429, 429]
        assert counted(served).day_cost == 5_000_000
        assert limited_total(served, "cost_per_day") == 2


async def test_a_cost_limit_is_exact() -> None:
    """Three requests of a cost of 0.1 fit into a limit of 0.3: as binary fractions, their sum would be larger."""
    async with gateway(limited(cost_per_day=300_000_000), price=price(0.0, 50_000.0)) as (served, _):
        assert await statuses(served, 4, request(chat(max_tokens=2))) == [200, 200, 200, 429]
        assert counted(served).day_cost == 300_000_000


async def test_cached_and_reasoning_tokens_have_their_own_prices() -> None:
    """The response has 3 prompt tokens, of which 1 was cached, and 2 completion tokens."""
    async with gateway(limited(cost_per_day=10**9), price=price(1.0, 10.0, cached=0.25, reasoning=40.0)) as (served, _):
        assert await statuses(served, 1, request(chat(max_tokens=2))) == [200]
        assert counted(served).day_cost == 2 * 1000 + 250 + 2 * 10_000


@pytest.mark.parametrize("text", ["fail", "nothing wrong, but for another model"])
async def test_a_request_that_did_not_run_costs_no_tokens(text: str) -> None:
    async with gateway(limited(tokens_per_day=100_000, requests_per_minute=6)) as (served, _):
        fields = {} if text == "fail" else {"model": "unknown"}
        reply = await request_once(served.port, request(prompt(text, **fields)))
        assert reply.status in (400, 404)
        assert (counted(served).day, counted(served).in_flight) == (0, 0)
        assert ratelimits(reply)["remaining-requests"] == "5"


async def test_a_request_that_the_gateway_fails_does_not_count() -> None:
    async with gateway(limited(tokens_per_day=100_000, requests_per_minute=2)) as (served, _):
        served.context.draining = True
        assert await statuses(served, 4, request(chat())) == [503] * 4
        served.context.draining = False
        assert await statuses(served, 3, request(chat())) == [200, 200, 429]
        assert counted(served).day == 2 * USED


async def test_a_refusal_by_tokens_takes_no_request() -> None:
    async with gateway(limited(tokens_per_day=50, requests_per_minute=3)) as (served, _):
        assert await statuses(served, 1, request(chat(max_tokens=10))) == [200]
        assert await statuses(served, 5, request(chat(max_tokens=1000))) == [429] * 5
        assert await statuses(served, 1, request(chat(max_tokens=10))) == [200]


async def test_a_client_that_disconnects_pays_for_the_received_tokens() -> None:
    async with gateway(limited(tokens_per_day=100_000, concurrent=1)) as (served, _):
        body = prompt("stay", stream=True)
        async with client(served.port) as visitor:
            visitor.send(request(body))
            await visitor.reader.readuntil(HELLO)
            assert await statuses(served, 1, request(chat())) == [429]
        await until(lambda: counted(served).in_flight == 0)
        guess = len(orjson.dumps(body)) // 4
        assert guess + 1 <= counted(served).day <= guess + 2


async def test_concurrent_requests() -> None:
    async with gateway(limited(concurrent=2)) as (served, _):
        async with client(served.port) as first, client(served.port) as second:
            for visitor in (first, second):
                visitor.send(request(prompt("stay", stream=True)))
                await visitor.reader.readuntil(HELLO)
            reply = await request_once(served.port, request(chat()))
            assert (reply.status, reply.headers["retry-after"], reply.error["code"]) == (429, "1", "rate_limit_exceeded")
        await until(lambda: served.in_flight == 0)
        assert await statuses(served, 3, request(chat())) == [200] * 3
        assert limited_total(served, "concurrent") == 1


async def test_usage_is_counted_as_soon_as_a_stream_is_done() -> None:
    async def respond_without_closing(talk: Conversation) -> None:
        await talk.begin_stream()
        for each in (ROLE, HELLO, STOP, COUNT, DONE):
            await talk.chunk(each)
        await talk.closed_by_peer()

    async with (
        scripted(respond_without_closing) as server,
        serving([model(server.port)], [limited(concurrent=1, tokens_per_day=50_000)]) as served,
        client(served.port) as first,
    ):
        first.send(request(chat(stream=True)))
        await first.reader.readuntil(DONE)
        known = counted(served)
        first.disconnect()
        await until(lambda: not served.inline_tasks)
    assert (known.day, known.in_flight) == (USED, 0)


async def test_a_teams_keys_share_its_limits() -> None:
    team = Allowance("team research", Limits(requests_per_minute=3))
    one, two = limited("one", "sk-one", team, requests_per_minute=100), limited("two", "sk-two", team, requests_per_minute=2)
    async with gateway(one, two) as (served, _):
        assert await statuses(served, 2, request(chat(), token="sk-one")) == [200, 200]
        assert await statuses(served, 1, request(chat(), token="sk-two")) == [200]
        reply = await request_once(served.port, request(chat(), token="sk-one"))
        assert reply.status == 429 and "team research" in str(reply.error["message"])
        assert ratelimits(reply)["limit-requests"] == "3", "the tightest one"
        assert (limited_total(served, "requests_per_minute", "one"), limited_total(served, "requests_per_minute", "two")) == (1, 0)


async def test_limits_for_some_models() -> None:
    row = Allowance("key team-a for ti*", Limits(requests_per_minute=1, tokens_per_minute=500, max_tokens=100), ("ti*",))
    async with gateway(limited("team-a", KEY, row, requests_per_minute=5)) as (served, server):
        assert await statuses(served, 3, request(chat())) == [200, 429, 429]
        assert await statuses(served, 5, request(chat(model="other"))) == [200, 200, 200, 200, 429], "what a row refuses takes no request"
        assert server.requests[0].json["max_tokens"] == 100
        assert "max_tokens" not in server.requests[1].json
        assert (await request_once(served.port, request(chat(model="nothing")))).status == 429


@pytest.mark.parametrize("has_capacity", [True, False])
async def test_a_fallback_is_counted_as_itself(has_capacity: bool) -> None:
    first = Allowance("key team-a for tiny", Limits(requests_per_minute=5, tokens_per_day=50_000, concurrent=1), ("tiny",))
    second = Allowance("key team-a for other", Limits(requests_per_minute=1, tokens_per_day=50_000, max_tokens=70), ("other",))
    one = key(allowances=(Allowance("key team-a", Limits(tokens_per_day=50_000)), first, second))
    with refusing() as closed_port:
        async with scripted(respond) as server:
            models = [model(closed_port, fallbacks=("other",)), model(server.port, identity="other")]
            async with serving(models, [one]) as served:
                assert await statuses(served, 1, request(chat(model="other" if not has_capacity else "tiny"))) == [200]
                assert await statuses(served, 1, request(chat())) == [429]
                assert server.requests[0].json["max_tokens"] == 70
                assert [counted(served, f"key team-a for {name}").day for name in ("tiny", "other")] == [0, USED]
                assert counted(served).day == USED
                assert counted(served, "key team-a for tiny").in_flight == served.in_flight == 0


async def test_the_length_of_a_response() -> None:
    async with gateway(limited(max_tokens=100)) as (served, server):
        reply = await request_once(served.port, request(chat(extra_body={"max_completion_tokens": 101})))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_value", "max_completion_tokens")
        assert await statuses(served, 1, request(chat(prompt="raw", messages=None))) == [200]
        assert await statuses(served, 1, request({"model": "tiny", "prompt": "a"}, "/v1/completions")) == [200]
        assert [each.json.get("max_tokens") for each in server.requests] == [None, None]
        assert await statuses(served, 1, request(chat())) == [200]
        assert server.requests[-1].json["max_tokens"] == 100
        assert await statuses(served, 1, request(prompt("a" * 300_000))) == [200]
        assert server.requests[-1].json["max_tokens"] == 100, "a large body is read in steps"
        assert served.total("limited_total") == 0


async def test_a_reload_keeps_the_counts() -> None:
    async with gateway(limited(requests_per_minute=4)) as (served, _):
        assert await statuses(served, 2, request(chat())) == [200, 200]
        before = served.worker.snapshot
        served.worker.apply_snapshot(Snapshot(2, (limited(requests_per_minute=8, tokens_per_day=5000),), before.models))
        assert await statuses(served, 5, request(chat())) == [200, 200, 200, 200, 429], "half of it was used"
        served.worker.apply_snapshot(Snapshot(3, (key(),), before.models))
        assert await statuses(served, 2, request(chat())) == [200, 200]
        assert served.in_flight == 0


async def test_form_requests_are_limited_too() -> None:
    async def transcribe(talk: Conversation) -> None:
        await talk.respond(b'{"text":"hi"}')

    boundary = "--b\r\ncontent-disposition: form-data; name="
    form = f'{boundary}"model"\r\n\r\ntiny\r\n{boundary}"file"; filename="a"\r\n\r\n{"x" * 4000}\r\n--b--\r\n'.encode()
    data = request(form, "/v1/audio/transcriptions").replace(b"application/json", b"multipart/form-data; boundary=b")
    async with (
        scripted(transcribe) as server,
        serving([model(server.port)], [limited(requests_per_minute=2, tokens_per_minute=10)]) as served,
    ):
        assert await statuses(served, 3, data) == [200, 200, 429]


async def test_a_key_without_limits_gets_no_ratelimit_headers() -> None:
    async with gateway(key()) as (served, _):
        reply = await request_once(served.port, request(chat()))
        assert reply.status == 200 and ratelimits(reply) == {}
        assert served.total("limited_total") == 0


async def test_a_fallback_shows_the_limits_that_count_it() -> None:
    first = Allowance("key team-a for tiny", Limits(requests_per_minute=5), ("tiny",))
    second = Allowance("key team-a for other", Limits(requests_per_minute=9, tokens_per_day=50_000), ("other",))
    with refusing() as closed_port:
        async with scripted(respond) as server:
            models = [model(closed_port, fallbacks=("other",)), model(server.port, identity="other")]
            async with serving(models, [key(allowances=(first, second))]) as served:
                reply = await request_once(served.port, request(chat()))
                assert (reply.status, ratelimits(reply)["limit-requests"]) == (200, "9")
                assert ratelimits(reply)["limit-tokens-day"] == "50000"
