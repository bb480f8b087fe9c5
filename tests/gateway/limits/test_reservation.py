"""Whatever requests leave out, they use no more of a hard budget than they have reserved."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from time import monotonic, time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.api.media_urls import InlineMedia
from gateway.api.routes import OUTPUTS
from gateway.api.settlement import BYTES_PER_TOKEN, Settlement
from gateway.api.usage import Usage
from gateway.api.vllm.choices import choices_and_prompts
from gateway.api.vllm.lax_int import lax_int
from gateway.limits import Reservation
from gateway.limits.estimate import DEFAULT_COMPLETION, SHARES
from gateway.limits.expected_use import estimate_request
from gateway.limits.limiter import Limiter
from gateway.limits.reservation import reservation_of
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import moment
from gateway.snapshot.link import Health
from gateway.snapshot.money import Price
from gateway.snapshot.snapshot import Allowance, Budget, Key, Limits, Model, PerUser, Snapshot
from gateway.telemetry.metrics import WorkerMetrics
from tests.gateway.proxy.test_form import FILE, MODEL, form, part
from tests.support.running import Served, key, model, serving, shared_counters, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import chat, request, request_once
from upstream.balancing.server import Condition

CONTEXT = 32_768
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BUDGET = 20_000


def longest(document: Mapping[str, Any], path: str) -> int:
    """Return the completion tokens of a server that ends no response before its limit or its context."""
    output = OUTPUTS[path]
    stated = [lax_int(document[name]) for name in output.names if document.get(name) is not None]
    numbers = [number for number in stated if number is not None and number > 0]
    if len(numbers) < len(stated):
        return 0  # it refuses the request
    unsaid = CONTEXT if output.default is None or output.names[-1] in document else output.default
    each, prompts = choices_and_prompts(document)
    return min(numbers[0] if numbers else unsaid, CONTEXT) * each * prompts


class Server:
    """A server whose responses are as long as their requests allow. It responds when the test says so."""

    def __init__(self) -> None:
        self.resumed = asyncio.Event()
        self.resumed.set()

    async def __call__(self, talk: Conversation) -> None:
        await self.resumed.wait()
        document = talk.request.json
        completion = longest(document, CHAT)
        usage = {"prompt_tokens": prompt_of(talk.request.body), "completion_tokens": completion}
        if document.get("stream"):
            await talk.begin_stream()
            await talk.chunk(b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"choices": [], "usage": usage}))
            await talk.end_stream()
        else:
            await talk.respond(orjson.dumps({"choices": [], "usage": usage}))


def prompt_of(body: bytes) -> int:
    """Return the tokens of a prompt. The request has no more than what it is estimated at."""
    return len(orjson.dumps(chat())) // BYTES_PER_TOKEN if body else 0


def holder(**limits: Any) -> Allowance:
    return Allowance("key team-a", Limits(**limits))


def know_context(served: Served, tokens: int = CONTEXT) -> None:
    served.worker.apply_health(Health({"tiny#0": Condition.UP}, {"tiny": tokens}))


async def used(served: Served) -> float:
    (state,) = await served.context.limiter.states(served.worker.snapshot.keys[0], "req_1")
    assert state.used is not None
    return state.used


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"max_tokens": None}], ids=str)
async def test_parallel_requests_without_a_limit_use_no_more_than_the_budget(known: bool, fields: dict[str, Any]) -> None:
    script = Server()
    async with (
        scripted(script) as server,
        serving([model(server.port)], [key(allowances=(holder(tokens_per_day=BUDGET),))]) as served,
    ):
        if known:
            know_context(served)
        await request_once(served.port, request(chat(max_tokens=12_000)))
        script.resumed.clear()
        requests = [asyncio.create_task(request_once(served.port, request(chat(**fields)))) for _ in range(30)]
        await until(lambda: len(server.requests) - 1 + served.value("limited_total", "team-a", "tokens_per_day") == 30)
        admitted = len(server.requests) - 1
        script.resumed.set()
        statuses = [reply.status for reply in await asyncio.gather(*requests)]
        assert (statuses.count(200), statuses.count(429)) == (admitted, 30 - admitted) and admitted >= 2
        assert await used(served) <= BUDGET
        assert {lax_int(each.json["max_tokens"]) for each in server.requests[1:]} == {DEFAULT_COMPLETION}


async def test_the_limit_of_a_response_is_a_share_of_what_is_left() -> None:
    async with scripted(Server()) as server, serving([model(server.port)], [key(allowances=(holder(tokens_per_day=10**6),))]) as served:
        know_context(served)
        for _ in range(2):
            assert (await request_once(served.port, request(chat()))).status == 200
        prompt = len(orjson.dumps(chat())) // BYTES_PER_TOKEN
        first = (10**6 - prompt) // SHARES
        left = 10**6 - prompt - first
        assert [each.json["max_tokens"] for each in server.requests] == [first, (left - prompt) // SHARES]
        know_context(served, 2000)
        await request_once(served.port, request(chat()))
        assert server.requests[-1].json["max_tokens"] == 2000


async def test_a_limit_above_the_whole_budget_is_lowered() -> None:
    async with scripted(Server()) as server, serving([model(server.port)], [key(allowances=(holder(tokens_per_day=BUDGET),))]) as served:
        body = chat(max_completion_tokens=30_000, n=2)
        assert (await request_once(served.port, request(body))).status == 200
        prompt = len(orjson.dumps(body)) // BYTES_PER_TOKEN
        assert server.requests[0].json["max_completion_tokens"] == (BUDGET - prompt) // 2
        assert await used(served) <= BUDGET


@pytest.mark.parametrize("limits", [{}, {"requests_per_minute": 10}, {"tokens_per_minute": 10**6}, {"soft": True}], ids=str)
async def test_requests_of_other_keys_are_unchanged(limits: dict[str, Any]) -> None:
    allowances = (holder(budgets=(Budget("day", 0, 10**6, soft=True),)) if "soft" in limits else holder(**limits),) if limits else ()
    async with scripted(Server()) as server, serving([model(server.port)], [key(allowances=allowances)]) as served:
        know_context(served)
        await request_once(served.port, request(chat()))
        assert server.requests[0].json == chat()


@pytest.mark.parametrize(
    ("context", "max_tokens", "expected"), [(448, None, b"448"), (None, None, None), (None, 64, b"64"), (448, 64, b"64")]
)
async def test_a_form_is_bounded(context: int | None, max_tokens: int | None, expected: bytes | None) -> None:
    async def transcribe(talk: Conversation) -> None:
        await talk.respond(b'{"text":"hi"}')

    limited = key(allowances=(holder(tokens_per_day=BUDGET, max_tokens=max_tokens),))
    async with scripted(transcribe) as server, serving([model(server.port)], [limited]) as served:
        if context is not None:
            know_context(served, context)
        reply = await request_once(served.port, form(MODEL, part("language", b"en"), FILE))
        found = re.search(rb'name="max_completion_tokens"\r\n\r\n(\d+)\r\n', server.requests[0].body)
        assert (reply.status, found and found[1]) == (200, expected)


# Any requests

TOKENS = st.none() | st.integers(0, 40_000) | st.sampled_from(["50", "50.0", 70.0, "x", True])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": TOKENS,
        "max_completion_tokens": TOKENS,
        "max_output_tokens": TOKENS,
        "n": st.none() | st.integers(0, 5) | st.just("3"),
        "stream": st.booleans(),
        "prompt": st.sampled_from(["Hi", ["Hi", "Ho"], [1, 2, 3], [[1], [2], [3]]]),
    },
)
NANO = st.integers(0, 9 * 10**9)
LIMITS = st.builds(
    lambda day, cost, week, session: Limits(
        tokens_per_day=day, cost_per_day=cost, tokens_per_week=week, session=None if session is None else Budget("session", 0, session)
    ),
    st.none() | st.integers(1000, 10**6),
    st.none() | st.integers(10**6, 10**9),
    st.none() | st.integers(1000, 10**6),
    st.none() | st.integers(1000, 10**6),
)


@settings(deadline=None)
@given(
    limits=LIMITS,
    each=st.builds(Price, NANO, NANO, NANO, NANO),
    context=st.none() | st.just(CONTEXT),
    requests=st.lists(st.tuples(st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES]), FIELDS, st.booleans()), min_size=1, max_size=40),
)
def test_no_requests_use_more_than_a_hard_budget(
    limits: Limits, each: Price, context: int | None, requests: list[tuple[str, dict[str, Any], bool]]
) -> None:
    """Responses have the greatest length, and some of them stay open. Prompts have the tokens that they are estimated at."""
    client_key, served = Key("team-a", allowances=(Allowance("key team-a", limits),)), model(1, price=each)
    with shared_counters() as counts, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counts), buckets, lambda _: None)
        limiter.apply_snapshot(Snapshot(1, (client_key,), (served,)))
        limiter.max_model_len = {} if context is None else {served.id: context}
        running: list[tuple[Reservation, Usage]] = []
        for number, (path, fields, stays) in enumerate(requests):
            reservation = reservation_of(limiter, client_key, f"req_{number}", {b"x-session-id": b"one"})
            try:
                reservation.reserve_request()
                document = dict(fields)
                body = orjson.dumps(document)
                estimate_request(reservation, document, path, len(body), InlineMedia(), served)
                reservation.reserve_tokens()
            except Refusal:
                reservation.settle(Settlement(), 429)
                continue
            running.append((reservation, Usage(max(len(body) // BYTES_PER_TOKEN, 1), longest(document, path))))
            if not stays:
                finish(running)
        finish(running)
        known = reservation_of(limiter, client_key, "req_x", {b"x-session-id": b"one"})
        estimate_request(known, {}, CHAT, 0, InlineMedia(), served)
        left, whole = buckets.hard_capacity(known.holders(served), moment(monotonic(), time()))
        assert left.tokens >= 0 and left.cost >= 0, (left, whole)


def finish(running: list[tuple[Reservation, Usage]]) -> None:
    for reservation, usage in running:
        reservation.settle(Settlement(usage), 200)
    running.clear()


@pytest.mark.parametrize(("limits", "counts"), [(Limits(tokens_per_day=10**6), True), (Limits(requests_per_minute=10), False)], ids=str)
def test_a_prompt_is_estimated_if_a_limit_counts_tokens(limits: Limits, counts: bool) -> None:
    client_key, served = Key("team-a", allowances=(Allowance("key team-a", limits),)), model(1)
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        limiter.apply_snapshot(Snapshot(1, (client_key,), (served,)))
        reservation = reservation_of(limiter, client_key, "req_1", {})
        unsettled = [reservation.is_unsettled]
        reservation.reserve_request()
        unsettled.append(reservation.is_unsettled)
        estimate_request(reservation, {}, CHAT, 40, InlineMedia(), served)
        reservation.reserve_tokens()
        assert (reservation.counts_tokens, reservation.estimated_prompt) == (counts, 10 if counts else None)
        unsettled.append(reservation.is_unsettled)
        reservation.settle(Settlement(Usage(7, 3)), 200)
        assert [*unsettled, reservation.is_unsettled] == [False, True, True, False]
        left, _ = buckets.hard_capacity(reservation.holders(served), moment(monotonic(), time()))
        reservation.settle(Settlement(Usage(7, 3)), 200)
        again, _ = buckets.hard_capacity(reservation.holders(served), moment(monotonic(), time()))
        assert left == again and (not counts or left.tokens == 10**6 - 10)


@contextmanager
def arrived(served: Model, *allowances: Allowance) -> Iterator[Reservation]:
    """Yield the reservation of a request whose body has not been read."""
    client_key = Key("team-a", allowances=allowances)
    with shared_counters() as counters, closing(Buckets.private()) as buckets:
        limiter = Limiter(WorkerMetrics(counters), buckets, lambda _: None)
        limiter.apply_snapshot(Snapshot(1, (client_key,), (served,)))
        yield reservation_of(limiter, client_key, "req_1", {})


@pytest.mark.parametrize("has_price", [True, False])
def test_a_budget_of_cost_bounds_the_response_of_a_model_with_a_price(has_price: bool) -> None:
    served, document = model(1, price=Price(10**6, 10**6, 10**6, 10**6) if has_price else None), dict[str, Any]()
    with arrived(served, holder(cost_per_day=10**6)) as reservation:
        estimate_request(reservation, document, CHAT, 40, InlineMedia(), served)
    assert document == ({"max_tokens": DEFAULT_COMPLETION} if has_price else {})


@pytest.mark.parametrize(("user", "name"), [("Jane", "user jane"), (None, "without user")])
def test_a_body_names_its_end_user_before_the_response_is_bounded(user: str | None, name: str) -> None:
    served, document = model(1), dict[str, Any]()
    with arrived(served, Allowance("key team-a each user", Limits(tokens_per_day=10**6), users=PerUser())) as reservation:
        estimate_request(reservation, document, CHAT, 40, InlineMedia(), served, user)
        assert [each.name for each in reservation.holders(served)] == [f"key team-a {name}"]
    assert document == {"max_tokens": DEFAULT_COMPLETION}
