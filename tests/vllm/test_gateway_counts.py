"""Every token is counted: the gateway's figures equal those of the real vLLM, whatever the clients requested. Nothing is left running."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx2
import pytest

from tests.support.process import wait_for
from tests.vllm.dialogues import HANGZHOU, PROMPT_AND_CONTINUATION, WEATHER, Json, user
from tests.vllm.gateway import GENERATED, HEADERS, MODEL, Real, WorkUntil, attempted, chat
from tests.vllm.server import NOT_INSTALLED, installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USAGE: Json = {"stream_options": {"include_usage": True}}
CONTINUOUS: Json = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

ECHO: Json = {
    "input": 'Say "usage":{"input_tokens":0,"output_tokens":0}',
    "temperature": 0,
    "max_output_tokens": 40,
    "metadata": {"finish_reason": "abort", "usage": '{"input_tokens":0}'},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "usage": {"input_tokens": 0}, "finish_reason": "abort"}}],
    "tool_choice": "none",
    "enable_response_messages": True,
}
"""A request that makes vLLM echo text and JSON that look like fields of the response."""

MIXED: list[tuple[str, Json]] = [
    (CHAT, chat("Who are you?")),
    (CHAT, chat("Who are you?", stream=True)),
    (CHAT, chat("Count from 1 to 100.", stream=True)),
    (CHAT, chat("Count from 1 to 100.", stream=True, stop=["50"])),
    (CHAT, chat("Print something tricky.", stream=True, **USAGE)),
    (CHAT, chat("Never stop.", stream=True, max_tokens=100, **CONTINUOUS)),
    (CHAT, {"messages": [user("Say hello in Chinese with emoji.")], "temperature": 0, "stream": True}),
    (CHAT, {"messages": [user(HANGZHOU)], "temperature": 0, "tools": [WEATHER], "stream": True}),
    (CHAT, chat('Say {"usage": {"prompt_tokens": 99999, "completion_tokens": 99999}}', stream=True)),
    (COMPLETIONS, {"prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 60}),
    (COMPLETIONS, {"prompt": [PROMPT_AND_CONTINUATION[0], "Hello"], "temperature": 0, "max_tokens": 20, "stream": True}),
    (RESPONSES, {"input": "Who are you?", "temperature": 0}),
    (RESPONSES, {"input": "Who are you?", "temperature": 0, "stream": True}),
    (RESPONSES, ECHO),
    (RESPONSES, ECHO | {"stream": True}),
    (MESSAGES, {"messages": [user("Who are you?")], "max_tokens": 100, "temperature": 0}),
    (MESSAGES, {"messages": [user("Who are you?")], "max_tokens": 100, "temperature": 0, "stream": True}),
]


def counts(real: Real) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (prompt, completion) of vLLM and of the gateway."""
    by_vllm = real.count("vllm:prompt_tokens_total"), real.count(GENERATED)
    return by_vllm, (real.tokens("prompt"), real.tokens("completion"))


def difference(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    return after[0] - before[0], after[1] - before[1]


def usage(text: bytes) -> tuple[int, int]:
    """Return (prompt, completion) that a server's response reports, in any of the four dialects."""
    fields = [field for document in documents(text) for field in usages(document)]
    prompts = [int(field.get("prompt_tokens") or field.get("input_tokens") or 0) for field in fields]
    completions = [int(field.get("completion_tokens") or field.get("output_tokens") or 0) for field in fields]
    return max(prompts), max(completions)


def documents(text: bytes) -> Iterator[Json]:
    if text.startswith(b"{"):
        yield json.loads(text)
        return
    for event in text.split(b"\n\n"):
        _, found, data = event.partition(b"data: {")
        if found:
            yield json.loads(b"{" + data)


def usages(document: Json) -> list[Json]:
    holders: list[Any] = [document, document.get("response"), document.get("message")]
    return [holder["usage"] for holder in holders if isinstance(holder, dict) and holder.get("usage")]


def test_a_mixed_run_is_counted_to_the_token(real: Real) -> None:
    before = counts(real)
    alone, together = MIXED, list(itertools.islice(itertools.cycle(MIXED), 30))
    with ThreadPoolExecutor(8) as pool:
        responses = [real.post(*each) for each in alone] + list(pool.map(lambda each: real.post(*each), together))
    assert {response.status_code for response in responses} == {200}
    assert real.gateway.metric(f'vllm_gateway_server_failures_total{{model="{MODEL}",server="{MODEL}#0",reason="aborted"}}') == 0
    reported = [usage(real.recorded(response).output) for response in responses]
    expected = sum(prompt for prompt, _ in reported), sum(completion for _, completion in reported)
    wait_for(lambda: difference(before[0], counts(real)[0]) == expected)
    assert difference(before[1], counts(real)[1]) == expected


def test_several_choices_are_counted_as_their_usage_reports(real: Real) -> None:
    """vLLM's own counter counts the prompt once for each choice, its usage only once."""
    before = counts(real)[1]
    body = {**chat("Roll a die.", n=3, max_tokens=5), "temperature": 1}
    reported = [usage(real.recorded(real.post(CHAT, {**body, "stream": stream})).output) for stream in (False, True)]
    assert difference(before, counts(real)[1]) == (reported[0][0] + reported[1][0], reported[0][1] + reported[1][1])


def test_what_is_refused_costs_nothing(real: Real) -> None:
    before = counts(real)[1]
    assert real.post(CHAT, chat("Who are you?", stream=True, logprobs=True, top_logprobs=50)).status_code == 400
    assert real.post(CHAT, chat("Who are you?", temperature="hot")).status_code == 400
    assert counts(real)[1] == before


ENDLESS = 1900  # tokens, of "Never stop."


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_disconnect_frees_the_engine(real: Real, path: str) -> None:
    request: Json = {"model": MODEL, "temperature": 0, "stream": True}
    request |= {"input": "Never stop."} if path == RESPONSES else {"messages": [user("Never stop.")], "max_tokens": ENDLESS}

    def disconnect(work_until: WorkUntil) -> None:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_until, b"delta", real.gateway.url + path, request)
            work_until(reading.done)
            assert reading.result()

    check_that_it_frees_the_engine(real, disconnect)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_disconnect_before_the_response_frees_the_engine(real: Real, path: str) -> None:
    request = {"model": MODEL, "temperature": 0, "messages": [user("Never stop.")], "max_tokens": ENDLESS}

    def disconnect(_: WorkUntil) -> None:
        arrived = real.arrived()
        with closing(http.client.HTTPConnection("127.0.0.1", real.gateway.data, timeout=60)) as connection:
            connection.request("POST", path, json.dumps(request), {**HEADERS, "content-type": "application/json"})
            wait_for(lambda: real.arrived() > arrived)

    check_that_it_frees_the_engine(real, disconnect)


def read_until(text: bytes, url: str, request: Json) -> bool:
    """Read a response until it contains the text, then disconnect."""
    with httpx2.stream("POST", url, json=request, headers=HEADERS, timeout=60) as response:
        return any(text in piece for piece in response.iter_raw())


def check_that_it_frees_the_engine(real: Real, disconnect: Callable[[WorkUntil], None]) -> None:
    """Check that the engine becomes idle when it may work again, long before the end of the response."""

    def scenario(_: int) -> None:
        before = real.count(GENERATED)
        real.disconnect_in_mid_response(disconnect, tokens=ENDLESS)
        since = time.monotonic()
        wait_for(lambda: real.count("vllm:num_requests_running") == 0)
        print(f"nothing is running {1000 * (time.monotonic() - since):.0f} ms later")
        generated = real.count(GENERATED)
        time.sleep(0.3)  # enough for a hundred tokens
        assert generated - before < ENDLESS and real.count(GENERATED) == generated

    attempted(scenario)
