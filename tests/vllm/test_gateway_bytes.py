"""The client gets exactly the bytes that the real vLLM sent (recorded by the tee), without a usage event that it did not request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.vllm.dialogues import CALLED, CLOCK, HANGZHOU, PROMPT_AND_CONTINUATION, RESULT, TOOLSETS, WEATHER, Json, on_the_wire, user
from tests.vllm.gateway import ALIAS, MODEL, Real, chat
from tests.vllm.server import NOT_INSTALLED, installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HAVE_USAGE_EVENTS = (CHAT, COMPLETIONS)


def thinking(text: str, **more: object) -> Json:
    return {"messages": [user(text)], "temperature": 0, **more}


GENERATED: Mapping[str, tuple[str, Json]] = {
    "chat": (CHAT, chat("Who are you?")),
    "reasoning": (CHAT, thinking("Which is greater, 9.11 or 9.8?")),
    "no reasoning shown": (CHAT, thinking("Which is greater, 9.11 or 9.8?", include_reasoning=False)),
    "multi-byte": (CHAT, thinking("Say hello in Chinese with emoji.")),
    "looks like SSE": (CHAT, thinking("Print something tricky.")),
    "long": (CHAT, chat("Never stop.", max_tokens=1500)),
    "cut short": (CHAT, chat("Count from 1 to 100.", max_tokens=7)),
    "stopped": (CHAT, chat("Count from 1 to 100.", stop=["33"])),
    "a call": (CHAT, thinking(HANGZHOU, tools=[WEATHER])),
    "two calls": (CHAT, thinking("Compare the weather in Hangzhou and Paris.", tools=TOOLSETS[1])),
    "a required call": (CHAT, chat("Who are you?", tools=[WEATHER], tool_choice="required", max_tokens=200)),
    "a named call": (
        CHAT,
        chat("Who are you?", tools=[CLOCK], tool_choice={"type": "function", "function": {"name": "get_time"}}, max_tokens=200),
    ),
    "a call's result": (CHAT, {"messages": on_the_wire([user(HANGZHOU), CALLED, RESULT]), "tools": [WEATHER], "temperature": 0}),
    "a choice": (CHAT, chat("Who are you?", guided_choice=["红", "blue"])),
    "logprobs": (CHAT, chat("Who are you?", logprobs=True, top_logprobs=5)),
    "two answers": (CHAT, {**chat("Roll a die.", n=2), "temperature": 1}),
    "token ids": (CHAT, chat("Who are you?", return_token_ids=True)),
    "by its alias": (CHAT, {**chat("Who are you?"), "model": ALIAS}),
    "a message that talks of usage": (CHAT, chat('Say {"choices": [], "usage": {"prompt_tokens": 9}} and {"error": {"code": 400}}')),
    "completion": (COMPLETIONS, {"prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 60}),
    "echo": (COMPLETIONS, {"prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 2}),
    "several prompts": (COMPLETIONS, {"prompt": [PROMPT_AND_CONTINUATION[0], "你好"], "temperature": 0, "max_tokens": 20}),
    "token prompt": (COMPLETIONS, {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 20}),
    "response": (RESPONSES, {"input": "Say hello in Chinese with emoji.", "temperature": 0}),
    "tricky response": (RESPONSES, {"input": "Print something tricky.", "temperature": 0, "metadata": {"usage": "no"}}),
    "a response's call": (
        RESPONSES,
        {"input": HANGZHOU, "temperature": 0, "tools": [{"type": "function", **WEATHER["function"]}], "metadata": {"a": "b"}},
    ),
    "message": (MESSAGES, {"messages": [user("Print something tricky.")], "max_tokens": 600, "temperature": 0}),
    "a message's call": (
        MESSAGES,
        {
            "messages": [user(HANGZHOU)],
            "max_tokens": 200,
            "temperature": 0,
            "tools": [{"name": "get_current_weather", "input_schema": WEATHER["function"]["parameters"]}],
        },
    ),
}

PLAIN: Mapping[str, tuple[str, Json]] = {
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [user("Who are you?")]}),
    "tokenize": ("/tokenize", {"prompt": "naïve 你好", "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"messages": [user("Who are you?")]}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7]}),
}

OPTIONS: Mapping[str, Json] = {
    "usage": {"include_usage": True},
    "usage on every chunk": {"include_usage": True, "continuous_usage_stats": True},
    "no usage": {"include_usage": False},
    "usage on every chunk, but none": {"include_usage": False, "continuous_usage_stats": True},
}


@pytest.mark.parametrize("name", [*GENERATED, *PLAIN])
def test_a_complete_response(real: Real, name: str) -> None:
    path, body = {**GENERATED, **PLAIN}[name]
    got = real.post(path, body)
    assert got.status_code == 200, got.text
    assert got.content == real.recorded(got).output


@pytest.mark.parametrize("name", GENERATED)
def test_a_stream(real: Real, name: str) -> None:
    path, body = GENERATED[name]
    got = real.post(path, {**body, "stream": True})
    assert got.status_code == 200, got.text
    sent = real.recorded(got).output
    shown = without_usage(without_running_usage(sent)) if path in HAVE_USAGE_EVENTS else sent
    assert got.content == shown
    assert (shown == sent) == (path not in HAVE_USAGE_EVENTS)  # the gateway itself requested usage from the server


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("path", HAVE_USAGE_EVENTS)
def test_a_stream_with_options(real: Real, path: str, name: str) -> None:
    options = OPTIONS[name]
    body = chat("Who are you?") if path == CHAT else {"prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 20}
    got = real.post(path, {**body, "stream": True, "stream_options": options})
    sent = real.recorded(got).output
    if options != OPTIONS["usage on every chunk"]:
        sent = without_running_usage(sent)
    assert got.content == (sent if options["include_usage"] else without_usage(sent))
    assert (b'"usage":{' in got.content) == options["include_usage"]


@pytest.mark.parametrize("name", [name for name, (path, _) in GENERATED.items() if path in HAVE_USAGE_EVENTS])
def test_the_events_have_the_fields_that_the_server_sends_without_running_usage(real: Real, name: str) -> None:
    """Texts and their division into events differ from run to run. A busy engine can send a whole text with its end."""
    path, body = GENERATED[name]
    got = field_lists(real.post(path, {**body, "stream": True}).content)
    sent = field_lists(real.bytes_directly(path, {**body, "model": MODEL, "stream": True}))
    assert got.last == sent.last
    assert got.finishing <= {*sent.finishing, sent.last[:-1]}  # of several choices, only the last one has the fingerprint
    assert got.others == sent.others or not (got.others and sent.others)


def test_the_request_is_the_clients_own(real: Real) -> None:
    body = chat("naïve 你好 🌍 \u2028", seed=12345678901234567, logit_bias={"5": -0.1}, unknown={"a": [1, None, 0.1]})
    recorded = real.recorded(real.post(CHAT, {**body, "model": ALIAS}))
    assert json.loads(recorded.request) == {**body, "model": "tests/tiny"}
    known = {"host", "authorization", "content-type", "content-length", "x-request-id"}
    assert set(recorded.headers) == known


class FieldLists(NamedTuple):
    """The names of the fields of events, in their order: of the last event, of those that end a choice, and of the others."""

    last: tuple[str, ...]
    finishing: set[tuple[str, ...]]
    others: set[tuple[str, ...]]


def field_lists(stream: bytes) -> FieldLists:
    events = [json.loads(event.removeprefix(b"data: ")) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    found: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    for event in events:
        found[any(choice["finish_reason"] for choice in event["choices"])].add(tuple(event))
    return FieldLists(tuple(events[-1]), found[True], found[False])


def without_running_usage(sent: bytes) -> bytes:
    """Return the stream without the usage of its events with choices, which the gateway requested."""
    events = []
    for event in sent.split(b"\n\n"):
        document = json.loads(event.removeprefix(b"data: ")) if event.startswith(b"data: {") else {}
        if document.get("choices"):
            usage = b',"usage":' + json.dumps(document["usage"], separators=(",", ":")).encode()
            assert event.count(usage) == 1
            event = event.replace(usage, b"")
        events.append(event)
    return b"\n\n".join(events)


def without_usage(sent: bytes) -> bytes:
    """Return the stream without its one event that has usage and no choice. Its fingerprint is then on the event before."""
    events = sent.split(b"\n\n")  # blank lines of a text are escaped in JSON
    (at,) = (number for number, event in enumerate(events) if is_usage(event))
    fingerprint = json.loads(events[at].removeprefix(b"data: ")).get("system_fingerprint")
    if fingerprint is not None:
        events[at - 1] = events[at - 1].removesuffix(b"}") + b',"system_fingerprint":"%b"}' % fingerprint.encode()
    return b"\n\n".join(events[:at] + events[at + 1 :])


def is_usage(event: bytes) -> bool:
    data = event.removeprefix(b"data: ")
    document = json.loads(data) if data.startswith(b"{") else {}
    return document.get("choices") == [] and "usage" in document
