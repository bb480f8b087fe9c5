"""Old words in, today's words to the server, and the answer back in the old ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import orjson
import pytest

from tests.support.running import KEY, Served, model, serving, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COUNT, DONE, chat, client, event, request, request_once

COMPLETION = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny",
    "choices": [{"index": 0, "text": " there was", "logprobs": None, "finish_reason": "stop", "prompt_logprobs": None}],
    "usage": {"prompt_tokens": 4, "total_tokens": 6, "completion_tokens": 2},
}  # fmt: skip
CALL = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def text(piece: str, finish: str = "null") -> bytes:
    return event(f'[{{"index":0,"text":"{piece}","logprobs":null,"finish_reason":{finish}}}]').replace(
        b"chat.completion.chunk", b"text_completion"
    )


class Server:
    """Answers with what it is given."""

    response: Any = COMPLETION
    events: tuple[bytes, ...] = ()

    async def __call__(self, talk: Conversation) -> None:
        if not talk.request.json.get("stream"):
            await talk.respond(orjson.dumps(self.response))
            return
        await talk.begin_stream()
        for one in self.events:
            await talk.chunk(one)
            await asyncio.sleep(0)
        await talk.end_stream()


@pytest.fixture
async def trio() -> AsyncIterator[tuple[Served, Scripted, Server]]:
    server = Server()
    async with scripted(server) as running, serving([model(running.port)]) as served:
        yield served, running, server


def sdk(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key=KEY, max_retries=0)


async def test_a_raw_prompt_gets_a_response_in_chat_shape(trio: tuple[Served, Scripted, Server]) -> None:
    served, upstream, _ = trio
    body = {"model": "tiny", "prompt": "Once upon a time", "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2, "top_k": 3}
    reply = await request_once(served.port, request(body))
    assert upstream.requests[0].head.startswith(b"POST /v1/completions ")
    assert upstream.requests[0].json == {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 9, "logprobs": 2, "top_k": 3}
    response = orjson.loads(reply.body)
    assert response["object"] == "chat.completion" and response["usage"] == COMPLETION["usage"]
    (choice,) = response["choices"]
    assert choice["message"] == {"role": "assistant", "content": " there was"} and choice["finish_reason"] == "stop"
    assert "text" not in choice
    assert served.value("tokens_total", "team-a", "tiny", "completion") == 2
    assert served.value("requests_total", "tiny", "/v1/chat/completions", "200") == 1


async def test_a_raw_prompt_streams_in_chat_shape(trio: tuple[Served, Scripted, Server]) -> None:
    served, upstream, server = trio
    server.events = (text(" there"), text(" was"), text("", '"stop"'), COUNT, DONE)
    async with sdk(served) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=openai.NOT_GIVEN,
            stream=True,
            extra_body={"prompt": "Once upon a time"},  # type: ignore[call-overload]
        )
        chunks = [chunk async for chunk in stream]
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert "".join(delta.content or "" for delta in deltas) == " there was"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert upstream.requests[0].json["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    assert served.value("tokens_total", "team-a", "tiny", "completion") == 2


ODD = [
    {"choices": None},
    {"choices": [None]},
    {"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": [None], "token_logprobs": [0]}}]},
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("ending", [b"", b"0\r\n\r\n", DONE])
async def test_a_stream_that_cannot_be_translated_ends_with_an_error(odd: Any, ending: bytes) -> None:
    """In whichever read it comes: also in that which has the end of the answer."""
    first, strange = text("a"), b"data: " + orjson.dumps(odd) + b"\n\n"

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(first)
        await begun.wait()
        if ending == DONE:
            strange_end = strange + DONE
            await talk.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(strange_end), strange_end))
        else:
            await talk.write(b"%x\r\n%b\r\n%b" % (len(strange), strange, ending))

    async with scripted(script) as server, serving([model(server.port)]) as served, client(served.port) as one:
        begun = one.begun
        one.send(request({"model": "tiny", "prompt": "x", "stream": True}))
        async with asyncio.timeout(30):
            reply = await one.reply()
        assert reply.whole and reply.body.endswith(DONE)
        assert orjson.loads(reply.body.split(b"\n\n")[-3][6:])["error"]["code"] == "upstream_disconnected"
        await until(lambda: served.in_flight == 0)
        assert served.value("incomplete_total", "tiny", "upstream") == 1


@pytest.mark.parametrize("odd", ODD)
async def test_a_response_that_cannot_be_translated_is_a_failure_of_the_server(trio: tuple[Served, Scripted, Server], odd: Any) -> None:
    served, _, server = trio
    server.response = odd
    reply = await request_once(served.port, request({"model": "tiny", "prompt": "x"}))
    assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")


async def test_functions_become_tools_and_come_back(trio: tuple[Served, Scripted, Server]) -> None:
    served, upstream, server = trio
    server.response = {"object": "chat.completion", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}]}  # fmt: skip
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{}"}},
        {"role": "function", "name": "get_weather", "content": "sunny"},
    ]
    reply = await request_once(served.port, request(chat(messages=messages, functions=[function], function_call={"name": "get_weather"})))
    (choice,) = orjson.loads(reply.body)["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    seen = upstream.requests[0].json
    assert seen == {
        "model": "tiny",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_function_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "call_function_1", "content": "sunny"},
        ],
    }  # fmt: skip


async def test_invalid_messages_beside_functions_are_left_to_the_server(trio: tuple[Served, Scripted, Server]) -> None:
    served, upstream, _ = trio
    for messages in ("Hi", ["Hi", {"role": "user", "content": "Weather?"}]):
        await request_once(served.port, request(chat(messages=messages, functions=[{"name": "get_weather"}])))
        seen = upstream.requests[-1].json
        assert seen["messages"] == messages and "tools" in seen and "functions" not in seen


async def test_a_raw_prompt_is_text(trio: tuple[Served, Scripted, Server]) -> None:
    served, upstream, _ = trio
    reply = await request_once(served.port, request({"model": "tiny", "prompt": ["a", "b"]}))
    assert (reply.status, reply.error["param"], reply.error["message"]) == (400, "prompt", "The field 'prompt' must be a string.")
    assert upstream.requests == []


async def test_functions_stream(trio: tuple[Served, Scripted, Server]) -> None:
    served, _, server = trio

    def piece(delta: str, finish: str = "null") -> bytes:
        return event(f'[{{"index":0,"delta":{delta},"finish_reason":{finish}}}]')

    server.events = (
        piece('{"role":"assistant","content":""}'),
        piece('{"tool_calls":[{"id":"call_1","type":"function","index":0,"function":{"name":"get_weather"}}]}'),
        piece('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"city\\":"}}]}'),
        piece('{"tool_calls":[{"index":0,"function":{"arguments":" \\"Paris\\"}"}}]}'),
        piece("{}", '"tool_calls"'),
        COUNT,
        DONE,
    )
    reply = await request_once(served.port, request(chat(stream=True, functions=[{"name": "get_weather"}])))
    chunks = [orjson.loads(one[6:]) for one in reply.body.split(b"\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert "".join(call.get("name", "") for call in calls) == "get_weather"
    assert orjson.loads("".join(call.get("arguments", "") for call in calls)) == {"city": "Paris"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    assert not any("tool_calls" in delta for delta in deltas) and reply.body.endswith(DONE)


async def test_developer_messages_are_system_messages(trio: tuple[Served, Scripted, Server]) -> None:
    served, upstream, _ = trio
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": [{"type": "text", "text": "Now in French."}]},
    ]
    await request_once(served.port, request(chat(messages=messages)))
    assert upstream.requests[0].json["messages"] == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Now in French."}]},
    ]


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_regex": "a+", "guided_decoding_backend": "x"}, {"regex": "a+"}),
        ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": " "}, {"json": {"type": "object"}, "whitespace_pattern": " "}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"guided_choice": None}, None),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
async def test_guided_fields_become_structured_outputs(
    trio: tuple[Served, Scripted, Server], fields: dict[str, Any], constraint: Any, nested: bool
) -> None:
    served, upstream, _ = trio
    assert (await request_once(served.port, request(chat(**({"extra_body": fields} if nested else fields))))).status == 200
    seen = upstream.requests[0].json
    assert seen.get("structured_outputs") == constraint
    assert not any(name.startswith("guided") for name in seen)


async def test_a_raw_prompt_that_is_too_long_is_blamed_on_the_prompt(trio: tuple[Served, Scripted, Server]) -> None:
    served, _, server = trio
    error = {
        "message": "This model's maximum context length is 20 tokens.",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
    server.events = (b"data: " + orjson.dumps({"error": error}) + b"\n\n", DONE)
    reply = await request_once(served.port, request({"model": "tiny", "prompt": "x " * 99, "stream": True}))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_a_response_that_is_not_json_is_a_failure_of_the_server(trio: tuple[Served, Scripted, Server]) -> None:
    served, _, server = trio
    server.response = ["not", "a", "completion"]
    reply = await request_once(served.port, request({"model": "tiny", "prompt": "Once upon a time"}))
    assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
    assert served.value("server_failures_total", "tiny", "tiny#0", "bad_answer") == 1


async def test_a_large_response_is_translated_as_a_whole(trio: tuple[Served, Scripted, Server]) -> None:
    served, _, server = trio
    text = "x" * 1_000_000
    server.response = {**COMPLETION, "choices": [{**COMPLETION["choices"][0], "text": text}]}  # type: ignore[index]
    reply = await request_once(served.port, request({"model": "tiny", "prompt": "Once upon a time"}))
    assert orjson.loads(reply.body)["choices"][0]["message"]["content"] == text
