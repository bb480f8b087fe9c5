"""The responses, counts and failures of the simulator, over real sockets."""

from __future__ import annotations

import io
import json
import socket
import threading
import wave
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.upstream.simulator.test_process import WITHIN, Simulated, running, until

Body = dict[str, Any]

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}},
}

STREAMED = {
    "chat": (CHAT, {"messages": HELLO, "stream": True}),
    "completions": ("/v1/completions", {"prompt": "Hello", "max_tokens": 100, "stream": True}),
    "responses": ("/v1/responses", {"input": "Hello", "stream": True}),
    "messages": ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 100, "stream": True}),
}


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    flags = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "4096"]
    with running(*flags, "--sim-tokens-per-second", "1000") as one:
        yield one


@pytest.fixture(scope="module")
def plain() -> Iterator[Simulated]:
    """A simulator without parsers."""
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def _nothing_stays_in_flight(simulated: Simulated) -> Iterator[None]:
    simulated.client.delete("/sim/requests")
    yield
    until(lambda: simulated.metric("vllm:num_requests_running") == 0)


def streamed(simulated: Simulated, **fields: Any) -> list[str]:
    return events(simulated.chat(stream=True, **fields).text)


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def chunks(found: list[str]) -> list[Body]:
    return [json.loads(event.removeprefix("data: ")) for event in found if event != "data: [DONE]"]


def last_entry(simulated: Simulated) -> Body:
    return simulated.requests()[-1]


def raw(simulated: Simulated, body: Body, path: str = CHAT) -> socket.socket:
    """A connection on which the request has been sent."""
    connection = socket.create_connection(("127.0.0.1", simulated.port))
    connection.settimeout(WITHIN)
    content = json.dumps(body).encode()
    headers = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(headers.encode() + content)
    return connection


def everything(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    parts = []
    with connection:
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_the_same_request_has_the_same_response_streamed_or_not(simulated: Simulated) -> None:
    message = simulated.chat().json()["choices"][0]["message"]
    assert message == simulated.chat().json()["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(streamed(simulated))]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


def test_seed_and_prompt_make_other_texts(simulated: Simulated) -> None:
    texts = {simulated.chat(**fields).json()["choices"][0]["message"]["content"] for fields in ({}, {"seed": 1}, {"seed": 2})}
    assert len(texts) == 3
    with running("--sim-seed", "7") as other:
        assert other.chat().json()["choices"][0]["message"]["content"] not in texts


def test_choices_differ_and_are_counted_together(simulated: Simulated) -> None:
    response = simulated.chat(n=3, temperature=1, simulate={"tokens": 10}).json()
    assert len({choice["message"]["content"] for choice in response["choices"]}) == 3
    assert response["usage"]["completion_tokens"] == 30


def test_the_length_is_as_configured_and_the_limit_ends_it(simulated: Simulated) -> None:
    configured = simulated.chat(simulate={"tokens": 30}).json()
    assert (configured["usage"]["completion_tokens"], configured["choices"][0]["finish_reason"]) == (30, "stop")
    limited = simulated.chat(simulate={"tokens": 30}, max_tokens=7).json()
    assert (limited["usage"]["completion_tokens"], limited["choices"][0]["finish_reason"]) == (7, "length")
    endless = simulated.chat(ignore_eos=True, max_tokens=99).json()
    assert (endless["usage"]["completion_tokens"], endless["choices"][0]["finish_reason"]) == (99, "length")


def test_a_stop_string_ends_the_content_before_it(simulated: Simulated) -> None:
    whole = simulated.chat(simulate={"tokens": 40}).json()["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    choice = simulated.chat(simulate={"tokens": 40}, stop=[stop]).json()["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_thinking_can_be_turned_off(simulated: Simulated) -> None:
    assert simulated.chat().json()["choices"][0]["message"]["reasoning"]
    quiet = simulated.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert quiet["choices"][0]["message"]["reasoning"] is None
    assert quiet["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_tools_are_called_once_and_their_result_gets_a_response(simulated: Simulated) -> None:
    choice = simulated.chat(tools=[TOOL]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "look")
    assert list(json.loads(call["function"]["arguments"])) == ["at"]
    result = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    assert simulated.chat(messages=result, tools=[TOOL]).json()["choices"][0]["finish_reason"] == "stop"


def test_several_tools_are_called_if_configured(simulated: Simulated) -> None:
    fields = {"tools": [TOOL], "simulate": {"tool_calls": 3}}
    assert len(simulated.chat(**fields).json()["choices"][0]["message"]["tool_calls"]) == 3
    assert len(simulated.chat(**fields, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]) == 1
    assert simulated.chat(tools=[TOOL], simulate={"tool_calls": 0}).json()["choices"][0]["finish_reason"] == "stop"


def test_constraints_are_met(simulated: Simulated) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}

    def content(**fields: Any) -> str:
        generated: str = simulated.chat(**fields).json()["choices"][0]["message"]["content"]
        return generated

    assert json.loads(content(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})) == {"n": 3}
    assert isinstance(json.loads(content(response_format={"type": "json_object"})), dict)
    assert content(structured_outputs={"choice": ["red", "blue"]}) in ("red", "blue")
    assert content(structured_outputs={"regex": "[ab]{3}"}) == "aaa"
    assert json.loads(content(structured_outputs={"json": schema})) == {"n": 3}


def test_usage_is_where_it_was_requested(simulated: Simulated) -> None:
    assert not any("usage" in chunk for chunk in chunks(streamed(simulated)))
    with_usage = chunks(streamed(simulated, stream_options={"include_usage": True}))
    assert [chunk["choices"] for chunk in with_usage if "usage" in chunk] == [[]]
    running_usage = chunks(streamed(simulated, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert all("usage" in chunk for chunk in running_usage)


def test_usage_everywhere_by_flag_and_cached_tokens_by_flag() -> None:
    with running("--enable-force-include-usage", "--enable-prompt-tokens-details") as one:
        assert all("usage" in chunk for chunk in chunks(streamed(one)))
        long = [{"role": "user", "content": "word " * 100}]
        details = [one.chat(messages=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        salted = one.chat(messages=long, cache_salt="s").json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert details[0] == salted == 0
        assert details[1] > 64
        assert one.metric("vllm:prefix_cache_hits_total") == details[1]
        usage = one.post("/v1/messages", {"model": "tiny", "messages": long, "max_tokens": 1}).json()["usage"]
        entry = last_entry(one)
        assert usage["cache_read_input_tokens"] == details[1] == entry["prompt_tokens"] - usage["input_tokens"]


def test_the_counters_are_the_sum_of_usage_and_of_truncated_responses(simulated: Simulated) -> None:
    before = [simulated.metric(f"vllm:{kind}_tokens_total") for kind in ("prompt", "generation")]
    for number in range(4):
        simulated.chat(n=2, temperature=1, seed=number)
        streamed(simulated, seed=number)
        simulated.post("/v1/completions", {"prompt": ["a", "b"]})
        simulated.post("/v1/embeddings", {"input": ["a", "b"]})
    everything(raw(simulated, {"messages": HELLO, "stream": True, "simulate": {"cut_after": 5}}))
    raw(simulated, {"messages": HELLO, "stream": True, "simulate": {"hang_after": 5}}).close()
    made = 4 * 4 + 2
    until(lambda: [entry["outcome"] != "open" for entry in simulated.requests() if entry["path"].startswith("/v1/")] == [True] * made)
    entries = simulated.requests()
    prompts = sum(entry["prompt_tokens"] * (entry["body"] or {}).get("n", 1) for entry in entries)  # vLLM counts a prompt for each choice
    assert simulated.metric("vllm:prompt_tokens_total") - before[0] == prompts
    assert simulated.metric("vllm:generation_tokens_total") - before[1] == sum(entry["completion_tokens"] for entry in entries)


def test_only_requests_that_the_engine_has_finished_are_in_its_histograms() -> None:
    with running() as one:
        usage = one.chat(n=3, temperature=1).json()["usage"]
        one.post("/v1/embeddings", {"input": ["a", "b"]})
        finished = [one.metric(f"vllm:request_{kind}_tokens_sum") for kind in ("prompt", "generation")]
        assert finished == [one.metric(f"vllm:{kind}_tokens_total") for kind in ("prompt", "generation")]
        assert finished[0] > 3 * usage["prompt_tokens"] and finished[1] == usage["completion_tokens"]
        assert one.metric("vllm:request_generation_tokens_count") == 5
        everything(raw(one, {"messages": HELLO, "stream": True, "simulate": {"cut_after": 5}}))
        assert [one.metric(f"vllm:request_{kind}_tokens_sum") for kind in ("prompt", "generation")] == finished
        assert one.metric("vllm:generation_tokens_total") > finished[1]
        assert one.metric("http_requests_total", handler="/v1/chat/completions", method="POST", status="2xx") == 2


def test_what_the_journal_counts_is_the_usage(simulated: Simulated) -> None:
    for path, body in STREAMED.values():
        response = simulated.post(path, {**body, "stream": False}).json()
        usage = response["usage"]
        counted = [usage.get("prompt_tokens", usage.get("input_tokens")), usage.get("completion_tokens", usage.get("output_tokens"))]
        entry = last_entry(simulated)
        assert [entry["prompt_tokens"], entry["completion_tokens"]] == counted


def test_the_journal_shows_the_request_as_it_came(simulated: Simulated) -> None:
    simulated.post(f"{CHAT}?a=b", {"messages": HELLO, "max_tokens": 2}, headers={"X-Mine": "1"})
    entry = last_entry(simulated)
    assert (entry["method"], entry["path"], entry["query"]) == ("POST", CHAT, "a=b")
    assert ["x-mine", "1"] in entry["headers"]
    assert entry["body"] == {"messages": HELLO, "max_tokens": 2}
    assert (entry["outcome"], entry["status"], entry["completion_tokens"]) == ("finished", 200, 2)
    simulated.client.delete("/sim/requests")
    assert simulated.requests() == []


@pytest.mark.parametrize(("path", "body"), STREAMED.values(), ids=STREAMED)
@pytest.mark.parametrize("state", ["waiting", "generating", "hanging"])
def test_a_client_that_disconnects_ends_its_request(simulated: Simulated, path: str, body: Body, state: str) -> None:
    fields: dict[str, Body] = {
        "waiting": {"time_to_first_token": 600},
        "generating": {"tokens": 100_000, "tokens_per_second": 20},
        "hanging": {"hang_after": 3},
    }
    connection = raw(simulated, {**body, "simulate": fields[state]}, path)
    with connection:
        assert connection.recv(10) == b"HTTP/1.1 2"
        assert simulated.metric("vllm:num_requests_running") == 1
    until(lambda: simulated.metric("vllm:num_requests_running") == 0)
    until(lambda: last_entry_of(simulated, path)["outcome"] == "disconnected")


def last_entry_of(simulated: Simulated, path: str) -> Body:
    return [entry for entry in simulated.requests() if entry["path"] == path][-1]


def test_a_client_that_disconnects_before_the_headers_ends_its_request(simulated: Simulated) -> None:
    for behavior in ({"hang_before_headers": True}, {"time_to_first_token": 600}):
        connection = raw(simulated, {"messages": HELLO, "simulate": behavior})
        until(lambda: simulated.metric("vllm:num_requests_running") == 1)
        connection.close()
        until(lambda: simulated.metric("vllm:num_requests_running") == 0)
        until(lambda: last_entry_of(simulated, CHAT)["outcome"] == "disconnected")


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_cut_after_some_events_sends_exactly_those(simulated: Simulated, count: int) -> None:
    received = everything(raw(simulated, {"messages": HELLO, "stream": True, "simulate": {"cut_after": count}}))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.count(b"data: ") == count
    assert not received.endswith(b"0\r\n\r\n")
    until(lambda: last_entry_of(simulated, CHAT)["outcome"] == "cut")


@pytest.mark.parametrize("count", [0, 1, 6, 300, 301])
@pytest.mark.parametrize("size", [None, 7])
def test_a_cut_after_some_bytes_sends_exactly_those(simulated: Simulated, count: int, size: int | None) -> None:
    behavior = {"cut_bytes": count, "chunk_bytes": size}
    received = everything(raw(simulated, {"messages": HELLO, "stream": True, "simulate": behavior}))
    assert len(unchunked(received.split(b"\r\n\r\n", 1)[1])) == count
    assert not received.endswith(b"0\r\n\r\n")


def unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def test_a_cut_before_the_headers_sends_nothing(simulated: Simulated) -> None:
    assert everything(raw(simulated, {"messages": HELLO, "simulate": {"cut_before_headers": True}})) == b""


def test_a_non_streaming_response_can_be_cut_in_its_middle(simulated: Simulated) -> None:
    received = everything(raw(simulated, {"messages": HELLO, "simulate": {"cut_bytes": 50}}))
    assert b"content-length: " in received
    assert len(received.split(b"\r\n\r\n", 1)[1]) == 50


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_rechunking_changes_no_byte(simulated: Simulated, size: int) -> None:
    fields = {"messages": HELLO, "stream": True, "request_id": "same", "simulate": {"tokens": 12}}
    plain = simulated.post(CHAT, fields).text
    received = everything(raw_closing(simulated, {**fields, "simulate": {"tokens": 12, "chunk_bytes": size}}))
    body = received.split(b"\r\n\r\n", 1)[1]
    sizes = chunk_sizes(body)
    assert set(sizes[:-2]) <= {size}
    assert sizes[-1] == 0
    assert without_times(unchunked(body).decode()) == without_times(plain)


def raw_closing(simulated: Simulated, body: Body) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", simulated.port))
    connection.settimeout(WITHIN)
    content = json.dumps(body).encode()
    headers = (
        f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(headers.encode() + content)
    return connection


def chunk_sizes(body: bytes) -> list[int]:
    sizes = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        sizes.append(int(size, 16))
        body = rest[int(size, 16) + 2 :]
    return sizes


def without_times(text: str) -> list[Any]:
    return [{**chunk, "created": 0} for chunk in chunks(events(text))]


def test_an_error_comes_first_on_a_stream_and_as_a_status_otherwise(simulated: Simulated) -> None:
    (error, done) = streamed(simulated, simulate={"error_first": True})
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "InternalServerError"
    assert done == "data: [DONE]"
    plain = simulated.chat(simulate={"error_first": True})
    assert (plain.status_code, plain.json()["error"]["code"]) == (500, 500)


def test_an_error_comes_in_the_middle_of_a_stream(simulated: Simulated) -> None:
    found = streamed(simulated, simulate={"error_after": 3})
    assert len(found) == 1 + 3 + 2
    assert found[-2].startswith('data: {"error": {"message": "EngineCore')
    named = events(simulated.post("/v1/messages", {**STREAMED["messages"][1], "simulate": {"error_after": 3}}).text)
    assert named[-1].startswith("event: error\n")
    with pytest.raises(httpx2.RemoteProtocolError):
        simulated.post("/v1/responses", {**STREAMED["responses"][1], "simulate": {"error_after": 3}})


def test_an_abort_ends_with_its_own_reason(simulated: Simulated) -> None:
    found = streamed(simulated, simulate={"abort_after": 5}, stream_options={"include_usage": True})
    (*_, finish, usage) = chunks(found)
    assert finish["choices"][0]["finish_reason"] == "abort"
    assert usage["usage"]["completion_tokens"] == 5
    assert found[-1] == "data: [DONE]"


def test_a_status_refuses(simulated: Simulated) -> None:
    refused = simulated.chat(simulate={"status": 503})
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "Service Unavailable")
    assert last_entry(simulated)["outcome"] == "refused"


@pytest.mark.parametrize("name", STREAMED)
def test_an_engine_that_has_died_is_a_status_on_every_route(simulated: Simulated, name: str) -> None:
    path, body = STREAMED[name]
    failed = simulated.post(path, {**body, "stream": False, "simulate": {"error_first": True}})
    assert failed.status_code == 500
    assert failed.json()["error"]["message"].startswith("EngineCore")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("auto", '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
        ("required", 'tool_choice="required" requires --tool-call-parser to be set'),
        ({"type": "function", "function": {"name": "look"}}, 'tool_choice=function "look" requires --tool-call-parser to be set'),
    ],
)
def test_without_a_parser_no_tool_can_be_called(plain: Simulated, choice: Any, message: str) -> None:
    refused = plain.chat(tools=[TOOL], tool_choice=choice)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
    assert plain.chat(tools=[TOOL], tool_choice="none").status_code == 200


def test_a_continued_message_is_repeated_if_requested(plain: Simulated) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    text = plain.post(CHAT, body).json()["choices"][0]["message"]["content"]
    found = chunks(events(plain.post(CHAT, {**body, "stream": True}).text))
    assert text.startswith("I am")
    assert "".join(each["choices"][0]["delta"]["content"] for each in found if "content" in each["choices"][0]["delta"]) == text


def test_token_ids_replace_a_prompt(plain: Simulated) -> None:
    ids = plain.post("/tokenize", {"prompt": "Once upon a time"}).json()["tokens"]
    usage = plain.chat(kv_transfer_params={"prompt_token_ids": ids}).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)


def test_a_hang_sends_what_it_has_and_then_nothing(simulated: Simulated) -> None:
    with raw(simulated, {"messages": HELLO, "stream": True, "simulate": {"hang_after": 2}}) as connection:
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(65536)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_client_that_disconnects_in_its_body_is_in_the_journal(simulated: Simulated) -> None:
    with socket.create_connection(("127.0.0.1", simulated.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf".encode())
        until(lambda: len(simulated.requests()) == 1)
    until(lambda: last_entry(simulated)["outcome"] == "disconnected")
    assert last_entry(simulated)["body"] == "half"


def test_a_process_dies_in_the_middle_of_a_response() -> None:
    with running() as one:
        received = everything(raw(one, {"messages": HELLO, "stream": True, "simulate": {"die_after": 4}}))
        assert received.count(b"data: ") == 1 + 3
        assert one.process.wait(WITHIN) == 1


def test_a_misspelt_setting_is_refused(simulated: Simulated) -> None:
    refused = simulated.chat(simulate={"tokns": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "body.simulate.tokns"


def test_the_servers_own_behavior_yields_to_the_requests() -> None:
    with running("--sim-status", "503") as one:
        assert one.chat().status_code == 503
        assert one.chat(simulate={"status": None}).status_code == 200


def test_many_streams_at_once_are_each_whole(simulated: Simulated) -> None:
    endings: list[str] = []

    def request(number: int) -> None:
        with httpx2.Client(base_url=simulated.url, timeout=WITHIN) as client:
            response = client.post(CHAT, json={"messages": HELLO, "seed": number, "stream": True, "simulate": {"tokens": 20}})
            endings.append(response.text[-len("data: [DONE]\n\n") :])

    threads = [threading.Thread(target=request, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert endings == ["data: [DONE]\n\n"] * 40


POOLED: dict[str, tuple[str, Body, str]] = {
    "embeddings": ("/v1/embeddings", {"input": ["a", "b"]}, "data"),
    "pooling": ("/pooling", {"input": ["a", "b"]}, "data"),
    "classify": ("/classify", {"input": ["a", "b"]}, "data"),
    "score": ("/score", {"text_1": "a", "text_2": ["b", "c"]}, "data"),
    "v1 score": ("/v1/score", {"queries": "a", "documents": ["b", "c"]}, "data"),
    "rerank": ("/rerank", {"query": "a", "documents": ["b", "c"]}, "results"),
    "v1 rerank": ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, "results"),
    "v2 rerank": ("/v2/rerank", {"query": "a", "documents": ["b", "c"]}, "results"),
}


@pytest.mark.parametrize(("path", "body", "field"), POOLED.values(), ids=POOLED)
def test_pooling_routes_return_each_text_with_usage(simulated: Simulated, path: str, body: Body, field: str) -> None:
    responses = [simulated.post(path, {"model": "tiny", **body}).json() for _ in range(2)]
    assert len(responses[0][field]) == 2
    assert responses[0][field] == responses[1][field]
    assert responses[0]["usage"]["total_tokens"] == responses[0]["usage"]["prompt_tokens"] > 0
    assert simulated.post(path, {**body, "model": "other"}).status_code == 404


COHERE: dict[str, Body] = {
    "texts": {"texts": ["a", "b"]},
    "images": {"images": ["data:image/png;base64,AA==", "data:image/png;base64,AB=="]},
    "inputs": {"inputs": [{"content": [{"type": "text", "text": "a"}]}, {"content": [{"type": "text", "text": "b"}]}]},
}


@pytest.mark.parametrize("given", COHERE)
def test_coheres_embeddings_have_their_types_and_billed_units(simulated: Simulated, given: str) -> None:
    kinds = ["float", "base64", "binary", "ubinary"]
    response = simulated.post("/v2/embed", {"model": "tiny", **COHERE[given], "embedding_types": kinds, "output_dimension": 16}).json()
    shown = response["embeddings"]
    assert [len(shown[kind]) for kind in kinds] == [2, 2, 2, 2]
    assert [len(shown["float"][0]), len(shown["binary"][0]), len(shown["ubinary"][0])] == [16, 2, 2]
    assert [number + 128 for number in shown["binary"][0]] == shown["ubinary"][0]
    billed = response["meta"]["billed_units"]
    assert (billed["image_tokens"] > 0) == (given == "images") and (billed["input_tokens"] > 0) == (given != "images")
    assert response.get("texts") == COHERE[given].get("texts")


@pytest.mark.parametrize("body", [{}, {"texts": []}, {"texts": ["a"], "images": ["b"]}, {"texts": ["a"], "input_type": "search_query"}])
def test_coheres_embeddings_are_refused_as_vllm_does(simulated: Simulated, body: Body) -> None:
    assert simulated.post("/v2/embed", {"model": "tiny", **body}).status_code == 400


def test_a_batch_has_a_choice_for_each_conversation(simulated: Simulated) -> None:
    path, body = CHAT + "/batch", {"model": "tiny", "messages": [HELLO, [{"role": "user", "content": "Bye"}]], "max_tokens": 4}
    response = simulated.post(path, body).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1]
    alone = [simulated.post(CHAT, {**body, "messages": each}).json() for each in body["messages"]]  # type: ignore[attr-defined]
    assert [choice["message"] for choice in response["choices"]] == [each["choices"][0]["message"] for each in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert response["usage"][name] == sum(each["usage"][name] for each in alone)


def test_embeddings_have_the_requested_size_and_encoding(simulated: Simulated) -> None:
    (one,) = simulated.post("/v1/embeddings", {"input": "a", "dimensions": 8}).json()["data"]
    assert len(one["embedding"]) == 8
    (packed,) = simulated.post("/v1/embeddings", {"input": "a", "dimensions": 8, "encoding_format": "base64"}).json()["data"]
    assert len(packed["embedding"]) == 44


@pytest.mark.parametrize("size", [-1, 0, 17, 1_000_000_000])
def test_embeddings_of_an_impossible_size_are_refused(simulated: Simulated, size: int) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a", "dimensions": size}),
        ("/v2/embed", {"model": "tiny", "texts": ["a"], "output_dimension": size}),
    ):
        response = simulated.post(path, body)
        assert response.status_code == 400 and "only supports dimensions in range [1, 16]" in response.text


def test_ranks_fall_and_are_cut_at_the_top(simulated: Simulated) -> None:
    results = simulated.post("/rerank", {"query": "q", "documents": list("abcdef"), "top_n": 4}).json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert len(scores) == 4
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": "a", "text_2": []}, "At least one text_pair element must be given"),
        ("/score", {"text_1": [], "text_2": "a"}, "At least one text element must be given"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "Input lengths must be either 1:1, 1:N or N:N"),
        ("/v1/embeddings", {"model": "tiny"}, "1 validation error:"),
        ("/v1/embeddings", {"input": "a", "simulate": {"status": 500}}, "Internal Server Error"),
        ("/v1/embeddings", {"input": "a", "simulate": {"error_first": True}}, "EngineCore encountered an issue."),
    ],
)
def test_pooling_requests_that_are_refused(simulated: Simulated, path: str, body: Body, message: str) -> None:
    refused = simulated.post(path, body)
    assert refused.status_code == (500 if "simulate" in body else 400)
    assert refused.json()["error"]["message"].startswith(message)


def test_a_conversation_has_an_embedding(simulated: Simulated) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    one, same = (simulated.post("/v1/embeddings", {"messages": each}).json() for each in (parts, [{"role": "user", "content": "a\nb"}]))
    assert one["data"] == same["data"] and one["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("name", ["transcriptions", "translations"])
def test_audio_responses_are_plain_and_streamed(simulated: Simulated, name: str) -> None:
    def hear(**fields: str) -> httpx2.Response:
        return simulated.client.post(f"/v1/audio/{name}", files={"file": ("a.wav", b"\x01" * 32000)}, data={"model": "tiny", **fields})

    text = hear().json()["text"]
    assert text
    found = chunks(events(hear(stream="true", stream_include_usage="true").text))
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in found if chunk["choices"]) == text
    assert found[-1]["usage"]["completion_tokens"] > 0
    assert simulated.client.post(f"/v1/audio/{name}", data={"model": "tiny"}, files={"other": b""}).status_code == 400
    unasked = events(hear(stream="true").text)
    assert unasked[-1] == "data: [DONE]" and all("usage" not in chunk for chunk in chunks(unasked))


def transcribed(simulated: Simulated, content: bytes, **fields: str) -> httpx2.Response:
    data = {"model": "tiny", **fields}
    return simulated.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", content)}, data=data)


def test_a_recording_has_the_seconds_of_its_file(simulated: Simulated) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(2 * 8000 * 3))
    assert transcribed(simulated, file.getvalue()).json()["usage"] == {"type": "duration", "seconds": 3}
    detailed = transcribed(simulated, file.getvalue(), response_format="verbose_json", language="de").json()
    (segment,) = detailed["segments"]
    assert (detailed["duration"], detailed["language"], segment["end"]) == (3.0, "de", 3.0)
    assert segment["text"] == detailed["text"] != ""


def test_a_form_may_say_how_its_response_is(simulated: Simulated) -> None:
    failed = transcribed(simulated, b"\x01" * 32000, simulate='{"error_first": true}')
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "InternalServerError")
    (error, done) = events(transcribed(simulated, b"\x01" * 32000, simulate='{"error_first": true}', stream="true").text)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (b"", {}, "Invalid or unsupported audio file."),
        (b"\x01", {"response_format": "srt"}, "Currently only support response_format: "),
    ],
)
def test_recordings_that_are_refused(simulated: Simulated, content: bytes, fields: dict[str, str], message: str) -> None:
    refused = transcribed(simulated, content, **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(message)


def test_tokens_are_those_that_usage_counts(simulated: Simulated) -> None:
    text = "Once upon a time — 你好 🙂\n"
    response = simulated.post("/tokenize", {"prompt": text}).json()
    assert response["count"] == simulated.post("/v1/completions", {"prompt": text}).json()["usage"]["prompt_tokens"]
    assert simulated.post("/detokenize", {"tokens": response["tokens"]}).json() == {"prompt": text}
    counted = simulated.post("/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}).json()["input_tokens"]
    assert counted == simulated.chat().json()["usage"]["prompt_tokens"]


def test_an_empty_conversation_that_is_continued_has_no_tokens(simulated: Simulated) -> None:
    response = simulated.post("/tokenize", {"messages": [], "continue_final_message": True, "add_generation_prompt": False})
    assert (response.status_code, response.json()["count"]) == (200, 0)


def test_unknown_routes_and_methods_are_fastapis(simulated: Simulated) -> None:
    assert simulated.client.get("/nothing").json() == {"detail": "Not Found"}
    wrong = simulated.client.get(CHAT)
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
