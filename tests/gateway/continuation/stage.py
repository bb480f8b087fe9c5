"""Streams through a gateway whose servers are lost at chosen events, compared with the same streams undisturbed.

The servers are simulators in separate processes. A proxy before each one disturbs its streams. The rule: a disturbed stream differs
from the undisturbed one only in what each response draws again: its ID, its time, the IDs of its calls, and how its tokens are grouped
into events.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import orjson

from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import UsageRow, decode, frames
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Key
from gateway.telemetry.request_record import RequestRecord
from tests.faults.invariants import unharmed
from tests.support.cutting_proxy import Cut, cutting_proxy
from tests.support.running import Served, key, model, until
from tests.support.wire import request, request_once
from tests.upstream.simulator.test_process import Simulated, running
from tests.vllm.server import Server
from upstream.balancing.server import Condition
from upstream.http.sse import data_of, split

Json = dict[str, Any]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PARSERS = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FLAGS = ("--enable-scale-out", "--served-model-name", "tiny", "--sim-tokens-per-second", "0", *PARSERS)
MANY_BYTES = ("--sim-preface", "你好,世界 🌍🇩🇪 — ", "--sim-tool-calls", "3")
"""Flags of servers whose responses have multi-byte text and several calls."""
TOOL = {
    "type": "function",
    "function": {"name": "look_at_it", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}},
}
IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
PLAIN: Json = {"chat_template_kwargs": {"enable_thinking": False}}
USAGE: Json = {"stream_options": {"include_usage": True}}
RUNNING_USAGE: Json = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def chat(text: str = "Hello", **fields: Any) -> Json:
    """Return a greedy chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True, **fields}


def completion(**fields: Any) -> Json:
    """Return a greedy completion request."""
    return {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "stream": True, "max_tokens": 40, **fields}


REQUESTS: Mapping[str, tuple[str, Json]] = {
    "reasoning": (CHAT, chat()),
    "reasoning, usage": (CHAT, chat("Who are you?", **USAGE)),
    "no reasoning": (CHAT, chat(**PLAIN)),
    "an image": (CHAT, {**chat(), "messages": [{"role": "user", "content": IMAGE}]}),
    "a long response": (CHAT, chat("Count.", min_tokens=140, max_tokens=140, **USAGE)),
    "cut by max_tokens": (CHAT, chat("Why?", max_tokens=16, **USAGE)),
    "tools": (CHAT, chat(tools=[TOOL], **USAGE)),
    "tools, no reasoning": (CHAT, chat("Look!", tools=[TOOL], **PLAIN)),
    "stop": (CHAT, chat("Go on.", stop=["ov"], **PLAIN, **USAGE)),
    "seed": (CHAT, {**chat("Draw."), "temperature": 1, "seed": 7}),
    "schema": (CHAT, chat("JSON!", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {
        "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}}, **PLAIN)),
    "completion": (COMPLETIONS, completion()),
    "completion, usage": (COMPLETIONS, completion(prompt="The end", **USAGE)),
    "completion of token IDs": (COMPLETIONS, completion(prompt=[65, 66, 67])),
    "completion, stop": (COMPLETIONS, completion(stop=["ov"])),
    "completion, text held back": (COMPLETIONS, completion(stop=["never there", "?" * 50], min_tokens=30, **USAGE)),
    "completion, all held back": (COMPLETIONS, completion(stop="!" * 500, **RUNNING_USAGE)),
    "message": (MESSAGES, {**chat(), "max_tokens": 60}),
    "message, tools": (MESSAGES, {**chat(), "max_tokens": 90, "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}]}),  # type: ignore[index]
    "response": (RESPONSES, {"model": "tiny", "input": "Hello", "temperature": 0, "stream": True}),
}  # fmt: skip
"""Greedy and seeded requests: each one's stream is the same on every server."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A stream as its client got it, and what the gateway recorded of it."""

    status: int
    body: bytes
    record: RequestRecord
    row: UsageRow

    @property
    def events(self) -> list[bytes]:
        return [event for event in split(self.body) if not event.isspace()]

    @property
    def charged(self) -> tuple[object, ...]:
        """The tokens of the ledger's row."""
        return self.row.prompt, self.row.completion, self.row.reasoning, self.row.estimated_by, self.row.status


_DRAWN = frozenset(
    {"id", "created", "created_at", "completed_at", "system_fingerprint", "item_id", "call_id", "sequence_number", "signature"}
)
_ORDER = {"reasoning": 1, "content": 2, "tool_calls": 3, "finish_reason": 4, "stop_reason": 5}
_TEXTS = frozenset({"content", "reasoning", "arguments", "text", "thinking", "partial_json", "delta"})


def shown(outcome: Outcome) -> list[Any]:
    """Return what a client sees: each value without those that are drawn. Texts that follow one another are joined.

    Raises AssertionError for a stream that draws a value twice, or does not end once.
    """
    seen: list[Any] = []
    identities = set()
    for event in outcome.events:
        data = data_of(event)
        if data == b"[DONE]":
            seen.append("DONE")
            continue
        document = orjson.loads(data)
        if "choices" in document:
            identities.add((document["id"], document["created"], document["model"], document["object"]))
            for choice in document.pop("choices"):
                _add(seen, ("choice", choice.pop("index")), choice)
            document = {name: value for name, value in document.items() if name not in ("model", "object")}
        _add(seen, (document.get("type"),), document)
    assert len(identities) <= 1, "each event has the ID and the time of the response"
    assert seen.count("DONE") == (outcome.record.endpoint in (CHAT, COMPLETIONS)) and (seen[-1] == "DONE" or "DONE" not in seen)
    return seen


def _add(seen: list[Any], path: tuple[object, ...], value: Any) -> None:
    """Add each value of a document with its path. A text extends the text before it with the same path; an empty one adds nothing."""
    if isinstance(value, dict):
        for name, each in sorted(value.items(), key=lambda item: _ORDER.get(item[0], 0)):  # the fields of an object have no order
            if name not in _DRAWN and not (name in _TEXTS and each == ""):
                _add(seen, (*path, name), each)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _add(seen, (*path, each.get("index", number) if isinstance(each, dict) else number), each)
    elif seen and path[-1] in _TEXTS and isinstance(value, str) and seen[-1][0] == path:
        seen[-1] = path, seen[-1][1] + value
    elif value is not None and path[-1] != "index":
        seen.append((path, value))


@dataclass
class Stage:
    """A gateway, the proxies before its servers, and its ledger. ``cuts``: of the next streams, whichever server has them.

    ``requests``: path and body by name.
    """

    served: Served
    journal: Journal
    cuts: deque[Cut | None]
    requests: Mapping[str, tuple[str, Json]]
    undisturbed: dict[str, Outcome] = field(default_factory=dict)
    _rows: dict[str, list[UsageRow]] = field(default_factory=dict)

    async def expected(self, name: str) -> Outcome:
        """Run a request without a disturbance, once."""
        if name not in self.undisturbed:
            self.undisturbed[name] = await self.run(name)
            assert (self.undisturbed[name].status, self.undisturbed[name].record.continuations) == (200, ())
        return self.undisturbed[name]

    async def run(self, name: str, *cuts: Cut | None) -> Outcome:
        """Run a request. ``cuts``: of its stream, and of the streams that continue it."""
        path, body = self.requests[name]
        return await self.send(path, body, *cuts)

    async def send(self, path: str, body: Json, *cuts: Cut | None) -> Outcome:
        """Run a request with this body. Without cuts, several can run at once."""
        for server in self.served.worker.fleet:
            server.record_success()  # no server is ejected, whatever the tests before have done
        self.cuts.extend(cuts)
        reply = await request_once(self.served.port, request(body, path))
        identity = reply.headers["x-request-id"]
        await until(lambda: any(record.id == identity for record in self.served.context.records))
        self._read_rows()
        [record] = [record for record in self.served.context.records if record.id == identity]
        [row] = self._rows.pop(identity)
        self.cuts.clear()
        return Outcome(reply.status, reply.body, record, row)

    def _read_rows(self) -> None:
        reading = self.journal.read()
        self.journal.release(reading)
        for payload in frames(reading.data):
            row = decode(payload)
            self._rows.setdefault(row.id, []).append(row)


@contextmanager
def simulators(count: int, *flags: str) -> Iterator[list[Simulated]]:
    """Run equal simulators."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(*FLAGS, *flags)) for _ in range(count)]


@asynccontextmanager
async def stage(
    servers: Sequence[Simulated | Server], requests: Mapping[str, tuple[str, Json]] = REQUESTS, keys: Sequence[Key] = (), **settings: Any
) -> AsyncIterator[Stage]:
    """Run a gateway with a proxy before each of these servers. ``settings``: of the model."""
    cuts: deque[Cut | None] = deque()
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(closing(Journal.create("test", 1 << 20, 8)))
        proxies = [await stack.enter_async_context(cutting_proxy(server.port, cuts)) for server in servers]
        named = model(*(proxy.port for proxy in proxies), **settings)
        served = await stack.enter_async_context(unharmed([named], keys or [key()], ledger=Recorder(journal)))
        report(served, *[Condition.UP] * len(servers))
        yield Stage(served, journal, cuts, requests)


def report(served: Served, *conditions: Condition, loaded: Sequence[str] = ()) -> None:
    """Report the servers' conditions to the worker, and what they have loaded. All of them have vLLM's scale-out routes."""
    names = [f"tiny#{number}" for number in range(len(conditions))]
    known = dict(zip(names, loaded, strict=False))
    served.worker.apply_health(Health(dict(zip(names, conditions, strict=True)), {}, scale_out=frozenset(names), loaded=known))


def check(outcome: Outcome, undisturbed: Outcome, *cuts: Cut, reasoning: bool = True) -> None:
    """Check that a client sees no difference, and that the request is charged as without the disturbance.

    ``reasoning``: also the number of the tokens of the reasoning.
    """
    seen, wanted = ([each for each in shown(one) if reasoning or each[0][-1] != "reasoning_tokens"] for one in (outcome, undisturbed))
    different = next(((one, other) for one, other in zip_longest(seen, wanted) if one != other), None)
    assert different is None, f"{cuts}: {different[0]} instead of {different[1]}, {outcome.record}"
    charged = [(each.charged if reasoning else each.charged[:2]) for each in (outcome, undisturbed)]
    assert charged[0] == charged[1], f"{cuts}: {charged}"
    assert (outcome.status, outcome.record.incomplete, outcome.record.code) == (200, None, None)


def cut_in(dice: random.Random, events: int) -> Cut:
    """Return a random cut of a stream: between two events, or in one, with or without a reset."""
    return Cut(dice.randrange(1, events), dice.choice((0, 0, dice.randrange(1, 60))), resets=dice.random() < 0.5)


async def trial(one: Stage, name: str, dice: random.Random, *, reasoning: bool = True) -> Outcome:
    """Cut a stream at a random event, and in one of three cases its continuation as well. Check that it is equal.

    ``reasoning``: the tokens of the reasoning are exact after one cut. A second one may come before their end has been found.
    """
    undisturbed = await one.expected(name)
    count = max(len(undisturbed.events), undisturbed.row.completion or 0)  # parsers buffer tokens, whose events the gateway removes
    cuts = [cut_in(dice, count)] + ([cut_in(dice, count)] if dice.random() < 1 / 3 else [])
    outcome = await one.run(name, *cuts)
    check(outcome, undisturbed, *cuts, reasoning=reasoning and len(cuts) == 1)
    return outcome


async def stop_trial(one: Stage, body: Json, dice: random.Random) -> Outcome:
    """Stop a completion at a random part of its text, and cut it at a random event. Check that it is equal, and was not regenerated."""
    events = [orjson.loads(data) for data in map(data_of, (await one.send(COMPLETIONS, body)).events) if data != b"[DONE]"]
    whole = "".join(choice["text"] for event in events for choice in event["choices"])
    start = dice.randrange(len(whole) // 3, len(whole) - 1)
    stops = [whole[start : start + dice.choice((1, 2, 5, 12, 30))], whole[: dice.randrange(1, 40)] + "?"]
    body = {**body, "stop": stops, "include_stop_str_in_output": dice.random() < 1 / 3}
    undisturbed = await one.send(COMPLETIONS, body)
    cuts = [cut_in(dice, max(len(undisturbed.events) - 1, 2)) for _ in range(dice.choice((1, 1, 2)))]
    outcome = await one.send(COMPLETIONS, body, *cuts)
    check(outcome, undisturbed, *cuts)
    assert {each.path for each in outcome.record.continuations} <= {"token_ids"}
    return outcome


async def sampled_trials(one: Stage, path: str, count: int) -> None:
    """Cut so many sampled streams, and check that no token is lost or repeated. The model must have ``resume: sampled``."""
    for number in range(count):
        body = {**(chat() if path == CHAT else completion()), "temperature": 1, "user": str(number)}
        undisturbed = await one.send(path, body)
        cut = Cut(2 + number * 7 % (len(undisturbed.events) - 4))
        outcome = await one.send(path, body, cut)
        check(outcome, undisturbed, cut)
        [continuation] = outcome.record.continuations
        assert (continuation.outcome, continuation.path, continuation.sampled) == ("continued", "token_ids", True)
