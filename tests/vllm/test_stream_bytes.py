"""Streams through the gateway have the bytes of the real vLLM's own streams, except for the rows of one table in docs/routes.md.

Each request is sent to vLLM directly and through the gateway. Values that are new in each run are replaced: IDs, times, signatures. vLLM
merges events while its engine is faster than its server. Two streams that are divided alike are compared as they are, others by their texts
and by the rest of each event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import ALIAS, MODEL, NotAchieved, Real, attempted, chat
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.test_gateway_bytes import CHAT, COMPLETIONS, GENERATED, MESSAGES, OPTIONS, RESPONSES

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

_ROUTES = Path(__file__).resolve().parents[2] / "docs" / "routes.md"
_LEFT_OUT = ("long", "a choice", "two answers")
"""1,500 tokens are never divided alike, vLLM ignores ``guided_choice``, and sampled texts without a seed differ."""

STREAMS: Mapping[str, tuple[str, Json]] = {
    **{name: request for name, request in GENERATED.items() if name not in _LEFT_OUT},
    "two seeded answers": (CHAT, {**chat("Roll a die.", n=2), "temperature": 1, "seed": 7}),
    "two seeded texts": (COMPLETIONS, {"prompt": "Hi", "temperature": 1, "seed": 7, "n": 2, "max_tokens": 8}),
    "echo alone": (COMPLETIONS, {"prompt": "Hi", "temperature": 0, "max_tokens": 0, "echo": True}),
    "structured": (CHAT, chat("Who are you?", structured_outputs={"choice": ["red", "blue"]})),
    "a response's reasoning": (RESPONSES, {"input": "Which is greater, 9.11 or 9.8?", "temperature": 0}),
    "a response that is cut short": (RESPONSES, {"input": "Count from 1 to 100.", "temperature": 0, "max_output_tokens": 7}),
    "a message that is cut short": (MESSAGES, {"messages": [user("Count from 1 to 100.")], "max_tokens": 7, "temperature": 0}),
    **{
        f"{path} with {name}": (path, {**body, "stream_options": options})
        for path, body in ((CHAT, chat("Who are you?")), (COMPLETIONS, GENERATED["completion"][1]))
        for name, options in {**OPTIONS, "null as options": None, "empty options": {}}.items()
    },
}
ERRORS: Mapping[str, tuple[str, Json]] = {
    "logprobs": (CHAT, chat("Hi", logprobs=True, top_logprobs=50)),
    "a regex": (CHAT, chat("Hi", structured_outputs={"regex": "((("})),
    "a bias": (COMPLETIONS, {"prompt": "Hi", "logit_bias": {"99999": 1}, "max_tokens": 5}),
}

_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"]*"(?=\}\n\n)')


def with_last_fingerprint(stream: bytes) -> bytes:
    """Return a stream without its fingerprints, except for the last one."""
    last = max((found.start() for found in _FINGERPRINT.finditer(stream)), default=0)
    return _FINGERPRINT.sub(b"", stream[:last]) + stream[last:]


FIRST_ERROR = "an error as the first event"
CONTINUABLE = "a stream that may be [continued on another server](continuation.md)"
"""The row of test_lost_streams, which compares their bytes: only a model with two servers has these streams."""
DIFFERENCES: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType(
    {"`system_fingerprint` in a stream of several choices or prompts": with_last_fingerprint}
)
"""The changes of a stream without errors, by the row of the table. Each returns the bytes that the client gets, from those of vLLM."""

_NEW_VALUES = (
    (re.compile(rb'"((?:\w+_)?id)":"[^"]*"'), rb'"\1":""'),
    (re.compile(rb'"(created(?:_at)?|completed_at)":[\d.]+'), rb'"\1":0'),
    (re.compile(rb'"signature":"[^"]*"'), b'"signature":""'),
    (re.compile(rb'"reasoning_tokens":\d+'), b'"reasoning_tokens":0'),  # it depends on the division into events
)


def normalized(stream: bytes) -> bytes:
    """Return a stream without the values that are new in each run."""
    for pattern, constant in _NEW_VALUES:
        stream = pattern.sub(constant, stream)
    return stream


def request_of(body: Json) -> Json:
    """Return the body of a stream for vLLM itself, which knows no alias."""
    return {"model": MODEL, **body, "stream": True} | ({"model": MODEL} if body.get("model") == ALIAS else {})


def texts(stream: bytes) -> list[object]:
    """Return how a stream is divided: what each event adds, for each of its choices."""
    found: list[object] = []
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            found.append([(each["index"], each.get("delta"), each.get("text")) for each in event.get("choices", [])] or event.get("delta"))
    return found


_TEXT = re.compile(rb'"(content|reasoning|thinking|text|delta|arguments|partial_json)":"((?:[^"\\]|\\.)*)"')
_NUMBER = re.compile(rb'"sequence_number":\d+')
_INDEX = re.compile(rb'"index":(\d+)')


def undivided(stream: bytes) -> tuple[dict[tuple[bytes, bytes], bytes], set[bytes]]:
    """Return the texts of a stream by choice and field, as they are written, and its events without texts and numbers."""
    joined: dict[tuple[bytes, bytes], bytes] = {}
    events = set()
    for event in stream.split(b"\n\n"):
        index = _INDEX.search(event)
        for name, text in _TEXT.findall(event):
            key = index[1] if index else b"", name
            joined[key] = joined.get(key, b"") + text
        events.add(_NUMBER.sub(b"", _TEXT.sub(rb'"\1":""', event)))
    return joined, events


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_the_servers_bytes(real: Real, name: str) -> None:
    path, body = STREAMS[name]

    def compare(_: int) -> None:
        directly = normalized(real.bytes_directly(path, request_of(body)))
        response = real.post(path, {**body, "stream": True})
        got = normalized(response.content)
        for change in DIFFERENCES.values():
            directly = change(directly)
        if texts(directly) == texts(got):
            assert got.split(b"\n\n") == directly.split(b"\n\n")
        elif undivided(directly) != undivided(got):
            raise NotAchieved  # token IDs and counts are divided as well

    attempted(compare)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_as_the_first_event_becomes_an_error_response(real: Real, name: str) -> None:
    path, body = ERRORS[name]
    directly = real.bytes_directly(path, request_of(body))
    assert directly.startswith(b'data: {"error": {') and directly.endswith(b"\n\ndata: [DONE]\n\n")
    response = real.post(path, {**body, "stream": True})
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert response.json()["error"]["code"] == "invalid_value"


def test_the_table_of_differences_is_that_of_the_page() -> None:
    section = _ROUTES.read_text().partition("## Bytes of a stream")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|[^|]+\|$", section, re.MULTILINE)
    assert rows[1:] == [*DIFFERENCES, FIRST_ERROR, CONTINUABLE]
