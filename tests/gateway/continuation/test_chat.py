"""The rest of a chat: the requests to the other server, and the events that are made of its responses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.api.routes import Dialect
from gateway.continuation.chat import ContinuedChat, InvalidReplyError
from gateway.continuation.events import DONE, event, usage_of
from gateway.continuation.token_record import TokenRecord

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
REQUEST = {"model": "m", "messages": [], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 10, "temperature": 0}
RENDERED = orjson.dumps({"token_ids": [8, 9], "sampling_params": {"n": 1, "max_tokens": 10, "temperature": 0.0}, "cache_salt": None})


def continued(*, reasoning: int | None = None, running: bool = False, **fields: Any) -> ContinuedChat:
    """Return the rest of a chat with a prompt of 2 tokens and a response of 2."""
    record = TokenRecord(Dialect.CHAT, lambda _: True)
    role = {**HEAD, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [8, 9]}
    first = {**HEAD, "choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [1, 2]}]}
    for document in (role, first):
        record.take(event(document), document)
    return ContinuedChat(record, {**REQUEST, **fields}, reasoning=reasoning, counted=2, running=running, limit=1 << 16)


def generated(ids: list[int], finish: str | None = None, stop: str | None = None) -> bytes:
    return event({"request_id": "g", "choices": [{"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": stop}]})


def derendered(delta: dict[str, Any], finish: str | None = None, **state: object) -> bytes:
    choice = {"index": 0, "delta": {"role": None, "tool_calls": [], **delta}, "finish_reason": finish, "stop_reason": None}
    return orjson.dumps({"chunk": {"id": "x", "choices": [choice]}, "stream_state": state})


def sent(rest: ContinuedChat) -> dict[str, Any]:
    """Return the next request to derender."""
    body: dict[str, Any] = orjson.loads(rest.derender_body("served"))
    return body


def test_the_tokens_so_far_are_part_of_the_prompt() -> None:
    rest = continued(min_tokens=5)
    rendered = orjson.loads(rest.render_body("served"))
    whole = {name: value for name, value in REQUEST.items() if not name.startswith("stream")}
    assert rendered == {**whole, "model": "served", "min_tokens": 5}
    body = orjson.loads(rest.generate_body(RENDERED, "served"))
    params = {"max_tokens": 8, "min_tokens": 3, "temperature": 0.0}
    assert body["token_ids"] == [8, 9, 1, 2]
    assert body["sampling_params"] == params
    assert (body["model"], body["stream"], body["reasoning_ended"]) == ("served", True, None)


def test_a_limit_that_render_omits_is_sent() -> None:
    rendered = orjson.dumps({"token_ids": [8, 9], "sampling_params": {}})
    assert orjson.loads(continued().generate_body(rendered, "m"))["sampling_params"] == {"max_tokens": 14}


@pytest.mark.parametrize(
    "rendered", [b"", b"[]", b"{}", b'{"token_ids":["a"],"sampling_params":{}}', b'{"token_ids":[1,2,3],"sampling_params":{}}']
)
def test_another_prompt_is_refused(rendered: bytes) -> None:
    with pytest.raises(InvalidReplyError):
        continued().generate_body(rendered, "m")


def test_the_first_state_is_that_of_the_response_so_far() -> None:
    rest = continued()
    rest.generate_body(RENDERED, "served")
    rest.feed(generated([3]) + generated([4]))
    body = sent(rest)
    assert body["stream_state"] == {
        "output_token_ids": [1, 2],
        "output_chunk_lens": [2],
        "role_sent": True,
        "tools_streamed": False,
        "last_tool_call_ids": [],
    }
    [choice] = body["generate_chunk"]["choices"]
    assert (choice["token_ids"], choice["finish_reason"], body["prompt_token_ids"]) == ([3, 4], None, [8, 9])


def test_the_events_are_those_of_the_lost_server() -> None:
    rest = continued(running=True)
    rest.generate_body(RENDERED, "m")
    rest.feed(generated([3]))
    sent(rest)
    choice = {"index": 0, "delta": {"content": "c"}, "logprobs": None, "finish_reason": None, "token_ids": [3]}
    assert rest.events(derendered({"content": "c"}, step=1)) == event({**HEAD, "choices": [choice], "usage": usage_of(2, 3)})
    assert not rest.has_tokens
    rest.feed(generated([4, 5], "stop") + DONE)
    body = sent(rest)
    assert body["stream_state"] == {"step": 1}
    assert body["generate_chunk"]["choices"][0]["token_ids"] == [4], "the token that ended the response has no text"
    ended = {"index": 0, "delta": {"content": "d"}, "logprobs": None, "finish_reason": "stop", "stop_reason": None, "token_ids": [4, 5]}
    last = event({**HEAD, "choices": [ended], "usage": usage_of(2, 5)})
    assert rest.events(derendered({"content": "d"}, "stop")) == last + event({**HEAD, "choices": [], "usage": usage_of(2, 5)}) + DONE
    assert rest.has_ended


@pytest.mark.parametrize(("choice", "groups"), [(None, [[3], [4], []]), ("auto", [[3], [4], []]), ("none", [[3, 4]])])
def test_tokens_that_may_be_calls_are_derendered_one_by_one(choice: str | None, groups: list[list[int]]) -> None:
    rest = continued(tools=[{}], tool_choice=choice)
    rest.generate_body(RENDERED, "m")
    rest.feed(generated([3, 4, 5], "stop"))
    shown, seen = b"", list[list[int]]()
    while rest.has_tokens:
        [made] = sent(rest)["generate_chunk"]["choices"]
        seen.append(made["token_ids"])
        shown += rest.events(derendered({"content": "c"}, made["finish_reason"]))
    assert seen == groups
    assert (shown.count(b'"finish_reason":"stop"'), shown.count(DONE)) == (1, 1)


def test_a_token_that_is_a_stop_token_of_the_request_has_a_text() -> None:
    rest = continued()
    rest.generate_body(RENDERED, "m")
    rest.feed(generated([3, 4], "stop", "4"))
    assert sent(rest)["generate_chunk"]["choices"][0]["token_ids"] == [3, 4]


@pytest.mark.parametrize("groups", [[[3, 4, 5, 0, 6]], [[3, 4, 5, 0], [6]], [[3, 0], [4, 0, 0], [5], [0], [0, 6]], [[3, 4, 5, 0, 0, 0, 7]]])
def test_the_tokens_of_the_reasoning_are_counted_up_to_its_end(groups: list[list[int]]) -> None:
    """The group in which the reasoning ended is derendered again in parts. Token 0 has no text: a part of a character, or a mark."""
    rest = continued(reasoning=2, running=True)
    rest.generate_body(RENDERED, "m")
    kinds, shown = {3: "reasoning", 4: "reasoning", 5: "reasoning", 6: "content", 7: "tool_calls"}, b""
    for group in groups:
        rest.feed(generated(group))
        while rest.has_tokens:
            delta: dict[str, Any] = {}
            for number in sent(rest)["generate_chunk"]["choices"][0]["token_ids"]:
                if number:
                    delta[kinds[number]] = delta.get(kinds[number], "") + str(number)
            shown += rest.events(derendered(delta))
    made = [number for group in groups for number in group]
    last = orjson.loads(shown.strip().rsplit(b"data: ", 1)[1])["usage"]
    assert last == usage_of(2, 2 + len(made), 2 + made.index(5) + 1)
    assert shown.count(b"data: ") == len(groups)


@pytest.mark.parametrize("data", [b"data: {]\n\n", b'data: {"choices":[{"token_ids":["a"]}]}\n\n'])
def test_other_events_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidReplyError):
        continued().feed(data)


@pytest.mark.parametrize("reply", [b"", b"{}", b'{"chunk":{},"stream_state":{}}', b'{"chunk":{"choices":[1]},"stream_state":{}}'])
def test_other_replies_are_refused(reply: bytes) -> None:
    rest = continued()
    rest.generate_body(RENDERED, "m")
    rest.feed(generated([3]))
    sent(rest)
    with pytest.raises(InvalidReplyError):
        rest.events(reply)


def test_an_error_of_the_other_server_is_noticed() -> None:
    rest = continued()
    rest.feed(b": a comment\n\n" + event({"error": {"message": "dead", "code": 500}}) + DONE)
    assert rest.failure == {"message": "dead", "code": 500}
