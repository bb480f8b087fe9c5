"""The ledger's rows equal the real vLLM's own count, to the token, for every complete response, and mark incomplete responses."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.api.response_fields import events_without_tokens
from tests.support.process import configuration, gateway, wait_for
from tests.support.shaky_server import shaky_server
from tests.vllm.dialogues import HANGZHOU, WEATHER, user
from tests.vllm.gateway import GENERATED, HEADERS, LEDGER, MODEL, WITHOUT_THINKING, NotAchieved, Real, WorkUntil, attempted, chat
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.test_gateway_counts import (
    CHAT,
    COMPLETIONS,
    CONTINUOUS,
    ENDLESS,
    MESSAGES,
    MIXED,
    RESPONSES,
    difference,
    documents,
    usage,
)
from tests.vllm.test_gateway_faults import option
from upstream.http.connection import STALE_WITHIN

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]


def every_row(real: Real) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(real.gateway.folder / "usage.db")) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(each) for each in connection.execute("SELECT * FROM gateway_usage")]


def rows(real: Real, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of these requests when all are stored."""

    def found() -> dict[str, dict[str, Any]]:
        return {each["request_id"]: each for each in every_row(real) if each["request_id"] in ids}

    wait_for(lambda: len(found()) == len(ids))
    return found()


@contextmanager
def beside_a_shaky_one(real: Real, folder: Path) -> Iterator[Real]:
    """Run another gateway with one model on two servers: the real vLLM and a server that fails."""
    key = folder / "internal.key"
    key.write_text(real.internal_key)
    with shaky_server() as shaky:
        vllm = {"url": f"unix:{option(real.shim(), '--uds')}", "api_key": {"file": str(key)}}
        model = {"id": MODEL, "balance": "round_robin", "servers": [vllm, {"url": shaky}]}
        with gateway(folder, configuration(model) | {"ledger": LEDGER}) as beside:
            yield Real(beside, real.folder)


def finished(real: Real) -> tuple[float, float]:
    """Return (prompt, completion) of the requests that vLLM has finished. vLLM does not count aborted requests."""
    return real.count("vllm:request_prompt_tokens_sum"), real.count("vllm:request_generation_tokens_sum")


def test_a_mixed_run_is_the_same_in_ledger_metrics_and_log(real: Real, tmp_path: Path) -> None:
    """One run with streams and complete responses, errors of clients and servers, disconnects, and retries."""

    def scenario(attempt: int) -> None:
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with beside_a_shaky_one(real, folder) as beside:
            _check_a_mixed_run(real, beside)

    attempted(scenario)


def _check_a_mixed_run(real: Real, beside: Real) -> None:
    """Check the run.

    Raises:
        NotAchieved: the machine was too slow for a retry.
    """
    before = finished(real)
    wrong = (CHAT, chat("Who are you?", temperature="hot"))
    with ThreadPoolExecutor(4) as pool:
        responses = [*pool.map(lambda each: beside.post(*each), [*MIXED, wrong, *MIXED, wrong, wrong])]
    left = _disconnect_in_mid_response(real, beside)
    responses += [beside.post(*each) for each in MIXED]
    sent = len(responses) + left
    wait_for(lambda: len(every_row(beside)) == sent, why=lambda: f"{len(every_row(beside))} rows of {sent}")
    stored = {each["request_id"]: each for each in every_row(beside)}
    assert len(stored) == sent
    if any(row["status"] == 502 and row["total_ms"] > 1000 * STALE_WITHIN for row in stored.values()):
        raise NotAchieved  # the failing server took longer than STALE_WITHIN to close a reused connection, so there was no retry
    assert beside.gateway.metric(f'vllm_gateway_retries_total{{model="{MODEL}"}}') > 0
    _check_ends(beside, responses, stored)
    reported = [row for row in stored.values() if row["status"] == 200]
    ledger = tuple(float(sum(row[f"{kind}_tokens"] for row in reported)) for kind in ("prompt", "completion"))
    everything = tuple(float(sum(row[f"{kind}_tokens"] or 0 for row in stored.values())) for kind in ("prompt", "completion"))
    assert (beside.tokens("prompt"), beside.tokens("completion")) == everything
    wait_for(lambda: real.count("vllm:num_requests_running") == 0)
    wait_for(lambda: difference(before, finished(real)) == ledger, why=lambda: f"{difference(before, finished(real))}, not {ledger}")


def _disconnect_in_mid_response(real: Real, beside: Real) -> int:
    """Disconnect from eight streams while vLLM works on them. Return their number.

    Raises:
        NotAchieved: vLLM had finished a stream before.
    """
    request = {"model": MODEL, **chat("Never stop.", stream=True, max_tokens=ENDLESS)}
    before = finished(real)

    def disconnect(work_until: WorkUntil) -> int:
        with ThreadPoolExecutor(8) as pool:
            reading = [pool.submit(_leave_after, 5, beside.gateway.url + CHAT, request) for _ in range(8)]
            work_until(lambda: all(each.done() for each in reading))
        return len(reading)

    left = real.disconnect_in_mid_response(disconnect, tokens=8 * ENDLESS, gateway=beside.gateway)
    if finished(real) != before:
        raise NotAchieved
    return left


def _check_ends(beside: Real, responses: Sequence[httpx2.Response], stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that each row matches what its client got. The row of a complete response has the usage that vLLM reported."""
    for response in responses:
        row = stored[response.headers["x-request-id"]]
        assert (row["status"], row["incomplete"], row["estimated"]) == (response.status_code, None, 0)
        reported = usage(beside.recorded(response).output) if response.status_code == 200 else (None, None)
        assert (row["prompt_tokens"], row["completion_tokens"]) == reported
    ways = {(row["status"], row["incomplete"], row["estimated"]) for row in stored.values()}
    assert ways == {(200, None, 0), (400, None, 0), (500, None, 0), (499, "client", 0)}
    assert {bool(row["stream"]) for row in stored.values() if row["status"] == 200} == {True, False}


LAST = frozenset({"response.completed", "message_delta", "message_stop"})
ENDLESSLY: dict[str, Any] = {"max_tokens": ENDLESS, "ignore_eos": True}
TRUNCATED: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": (CHAT, chat("Never stop.", **ENDLESSLY), 1),
    "reasoning": (CHAT, {"messages": [user("Never stop.")], "temperature": 0, **ENDLESSLY}, 1),
    "hidden reasoning": (
        CHAT,
        {"messages": [user("Never stop.")], "include_reasoning": False, **ENDLESSLY},
        1,
    ),
    "choices": (CHAT, {**chat("Never stop.", **ENDLESSLY, n=3), "temperature": 1}, 3),
    "tools": (CHAT, chat("Never stop.", **ENDLESSLY, tools=[WEATHER]), 1),
    "usage for the client": (CHAT, chat("Never stop.", **ENDLESSLY, **CONTINUOUS), 1),
    "completion": (COMPLETIONS, {"prompt": "Never stop.", **ENDLESSLY, "echo": True}, 1),
    "prompts": (COMPLETIONS, {"prompt": ["Never", "stop it."], **ENDLESSLY, "n": 2}, 2),
}
"""Streams, and how often vLLM counts the prompt of each."""
RUNNING = re.compile(rb'"index":(\d+),.*?"usage":\{"prompt_tokens":\d+,"total_tokens":\d+,"completion_tokens":(\d+)')


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_stream_whose_client_disconnects_is_counted_to_the_token(real: Real, name: str) -> None:
    """The prompt is the engine's own count. The completion is the sum over the choices of the counts in
    the last event of each choice that the client received.
    """
    path, body, times = TRUNCATED[name]
    request = {"model": MODEL, **body, "stream": True}

    def disconnect(work_until: WorkUntil) -> tuple[str, int]:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_end_after, 9, real.gateway.data, path, request)
            work_until(reading.done)
            return reading.result()

    def scenario(_: int) -> tuple[str, int, float, float]:
        before = real.count("vllm:prompt_tokens_total"), real.count(GENERATED)
        left = real.disconnect_in_mid_response(disconnect, tokens=times * ENDLESS)
        if rows(real, [left[0]])[left[0]]["status"] == 200:
            raise NotAchieved
        return *left, *before

    identity, events, prompt, generated = attempted(scenario)
    row = rows(real, [identity])[identity]
    assert (row["status"], row["incomplete"], row["estimated"], row["estimated_by"]) == (499, "client", 0, None)
    sent = {index: int(count) for index, count in RUNNING.findall(real.recorded_bytes(identity))[:events]}
    wait_for(lambda: real.count("vllm:num_requests_running") == 0)
    assert row["prompt_tokens"] * times == real.count("vllm:prompt_tokens_total") - prompt
    assert 0 < row["completion_tokens"] == sum(sent.values()) <= real.count(GENERATED) - generated


SPEAK: dict[str, Any] = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Speak."}]},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "20 C"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is warm."}]},
    user("Never stop."),
]
ITEMIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": (RESPONSES, {"input": "Never stop.", **WITHOUT_THINKING}),
    "responses with reasoning": (RESPONSES, {"input": "Never stop.", "reasoning": {"effort": "low"}}),
    "responses with items and tools": (RESPONSES, {"input": ITEMS, "instructions": "Be brief.", "tools": [{"type": "function", **SPEAK}]}),
    "messages": (MESSAGES, {"messages": [user("Never stop.")], "max_tokens": ENDLESS, **WITHOUT_THINKING}),
    "messages with thinking": (MESSAGES, {"messages": [user("Never stop.")], "max_tokens": ENDLESS}),
}
"""Streams without running usage."""


@pytest.mark.parametrize("name", ITEMIZED)
def test_a_truncated_stream_of_responses_or_messages_has_the_exact_prompt(real: Real, name: str) -> None:
    """The prompt is the engine's own count. The completion is the number of events with tokens, so at most the engine's count."""
    path, body = ITEMIZED[name]
    request = {"model": MODEL, "temperature": 0, **body, "stream": True}

    def disconnect(work_until: WorkUntil) -> tuple[str, int]:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(_end_after, 12, real.gateway.data, path, request)
            work_until(reading.done)
            return reading.result()

    def scenario(_: int) -> tuple[str, int, float, float]:
        before = real.count("vllm:prompt_tokens_total"), real.count(GENERATED)
        left = real.disconnect_in_mid_response(disconnect, tokens=ENDLESS)
        if rows(real, [left[0]])[left[0]]["status"] == 200:
            raise NotAchieved
        return *left, *before

    identity, events, prompt, generated = attempted(scenario)
    row = rows(real, [identity])[identity]
    assert (row["status"], row["incomplete"], row["estimated_by"]) == (499, "client", "events")
    wait_for(lambda: real.count("vllm:num_requests_running") == 0)
    assert row["prompt_tokens"] == real.count("vllm:prompt_tokens_total") - prompt
    assert 0 < row["completion_tokens"] == _deltas(real.recorded_bytes(identity), events) <= real.count(GENERATED) - generated


def _deltas(stream: bytes, events: int) -> int:
    """Return how many of the first events of a stream have tokens. The signature of a thinking block has none."""
    found = [event.partition(b"event: ")[2] for event in stream.split(b"\n\n")[:events]]
    return sum(event.partition(b"\n")[0].endswith(b"delta") and b"signature_delta" not in event for event in found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "Who are you?"}),
        (RESPONSES, {"input": "Say hello in Chinese with emoji."}),
        (RESPONSES, {"input": HANGZHOU, "tools": [{"type": "function", **WEATHER["function"]}]}),
        (MESSAGES, {"messages": [user("Say hello in Chinese with emoji.")], "max_tokens": 200}),
        (MESSAGES, {"messages": [user("Count from 1 to 100.")], "max_tokens": 500}),
    ],
)
def test_an_event_has_at_least_one_token(real: Real, path: str, body: dict[str, Any]) -> None:
    """So the number of events of a truncated stream is a lower bound of its tokens."""
    recorded = real.recorded(real.post(path, {"temperature": 0, **body, "stream": True}))
    found = [*documents(recorded.output)]
    without_tokens = sum(events_without_tokens(document) + (document["type"] in LAST) for document in found)
    assert 0 < len(found) - without_tokens <= usage(recorded.output)[1]


def _end_after(events: int, port: int, path: str, request: dict[str, Any]) -> tuple[str, int]:
    """Read ``events`` events, then end the client's side. Return the request ID and the number of events that the gateway sent in all."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", path, json.dumps(request), HEADERS | {"content-type": "application/json"})
        sending = connection.sock
        response = connection.getresponse()
        received = b""
        while received.count(b"\n\n") < events:
            received += response.read1()
        sending.shutdown(socket.SHUT_WR)
        with suppress(http.client.IncompleteRead, ConnectionResetError):
            while piece := response.read1():
                received += piece
        return str(response.headers["x-request-id"]), received.count(b"\n\n")


def _leave_after(events: int, url: str, request: dict[str, Any]) -> str:
    """Read ``events`` events, then disconnect. Return the request ID."""
    with httpx2.stream("POST", url, json=request, headers=HEADERS, timeout=120) as response:
        seen = 0
        for piece in response.iter_raw():
            seen += piece.count(b"\n\n")
            if seen >= events:
                break
        return str(response.headers["x-request-id"])
