"""Spans: the data for the collector, the header for the server, and the data that neither gets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx2
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, url_attributes

from gateway.api.routes import ENDPOINTS
from gateway.api.usage import Usage
from gateway.config import load
from gateway.snapshot.snapshot import Tracing
from gateway.telemetry.request_record import Continuation
from gateway.telemetry.trace import Sampler, Trace
from gateway.telemetry.tracing import Spans, attributes, operation, span
from tests.gateway.telemetry.test_metrics import record
from tests.support.collector import Collector, collector
from tests.support.collector import attributes as plain
from tests.support.process import configuration, gateway, launched, wait_for
from tests.support.rows import each_row
from tests.support.running import KEY, Served, model, serving, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, DONE, ROLE, chat, request, request_once

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
CANARY = "canary-5e1f"


@pytest.fixture
def collected() -> Iterator[Collector]:
    with collector() as one:
        yield one


async def responses(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        for event in (ROLE, DONE):
            await talk.chunk(event)
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


@asynccontextmanager
async def traced(to: Collector, sample: float = 1.0) -> AsyncIterator[tuple[Served, Scripted]]:
    async with scripted(responses) as server, serving([model(server.port)], tracing=Tracing(to.url, sample)) as served:
        yield served, server


def with_header(data: bytes, *lines: str) -> bytes:
    return data.replace(b"\r\n", b"\r\n" + "".join(line + "\r\n" for line in lines).encode(), 1)


async def test_a_request_is_a_span(collected: Collector) -> None:
    async with traced(collected) as (served, server):
        before = time.time()
        reply = await request_once(served.port, request(chat()))
        await until(lambda: collected.spans)
        (sent,) = server.requests
    (span,) = collected.spans
    assert collected.paths == ["/v1/traces"]
    assert (collected.resource["service.name"], span.name, span.kind) == ("vllm-gateway", "chat tiny", Span.SPAN_KIND_SERVER)
    assert span.parent_span_id == b"" and span.status.code == Status.STATUS_CODE_UNSET
    assert before - 1 < span.start_time_unix_nano / 1e9 <= span.end_time_unix_nano / 1e9 < time.time() + 1
    assert sent.header("traceparent") == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
    exported = plain(span.attributes)
    assert exported == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "url.path": "/v1/chat/completions", "url.scheme": "http",
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "tiny", "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2, "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.reasoning.output_tokens": 0, "vllm_gateway.request_id": reply.headers["x-request-id"],
        "vllm_gateway.key": "team-a", "vllm_gateway.server": "tiny#0", "vllm_gateway.retries": 0, "vllm_gateway.queued": 0.0,
    }  # fmt: skip


def test_a_continued_stream_has_an_event_for_each_lost_server() -> None:
    lost = Continuation("m#0", "moved", "token_ids", "continued", 0.25, 2, 130, at=1.5)
    made = span(record(continuations=(lost,)), Trace(TRACE, PARENT, None, True), Resource({}), "http")
    assert made.start_time is not None
    [event] = made.events
    assert (event.name, event.timestamp - made.start_time) == ("vllm_gateway.continuation", 1_500_000_000)
    prefix = "vllm_gateway.continuation."
    assert {name.removeprefix(prefix): value for name, value in (event.attributes or {}).items()} == {
        "server": "m#0", "cause": "moved", "path": "token_ids", "outcome": "continued",
        "gap": 0.25, "lost_tokens": 2, "prompt_tokens": 130, "sampled": False,
    }  # fmt: skip


def test_a_span_that_cannot_be_made_costs_itself_alone(collected: Collector, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Spans()) as gathered:
        gathered.endpoint = "no URL"
        gathered.add(record(trace=Trace(TRACE, PARENT, None, True)))
        gathered.flush()
        gathered.endpoint = collected.url
        for trace_id in ("none", TRACE):
            gathered.add(record(trace=Trace(trace_id, PARENT, None, True)))
        gathered.flush()
        wait_for(lambda: collected.spans)
    (span,) = collected.spans
    assert span.trace_id.hex() == TRACE
    assert "a span" in caplog.text


async def test_a_clients_trace_is_continued_to_the_server(collected: Collector) -> None:
    async with traced(collected) as (served, server):
        await request_once(
            served.port, with_header(request(chat(stream=True)), f"traceparent: {TRACEPARENT}", f"tracestate: vendor={CANARY}")
        )
        await until(lambda: collected.spans)
        (sent,) = server.requests
    (span,) = collected.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert sent.header("traceparent") == f"00-{TRACE}-{span.span_id.hex()}-01" and span.span_id.hex() != PARENT
    assert CANARY.encode() not in sent.head
    assert plain(span.attributes)["gen_ai.response.time_to_first_chunk"] > 0


async def test_a_refused_request_has_a_span_too(collected: Collector) -> None:
    async with traced(collected) as (served, server):
        await request_once(served.port, request(chat(), token="sk-no"))
        await request_once(served.port, request(chat(model="unknown")))
        await until(lambda: len(collected.spans) == 2)
        assert not server.requests
    refused, unknown = sorted(collected.spans, key=lambda span: span.start_time_unix_nano)
    assert (refused.name, plain(refused.attributes)["error.type"]) == ("POST /v1/chat/completions", "invalid_api_key")
    assert (unknown.name, plain(unknown.attributes)["http.response.status_code"]) == ("POST /v1/chat/completions", 404)
    assert {span.status.code for span in collected.spans} == {Status.STATUS_CODE_UNSET}, "the client's fault is no error here"


async def test_what_failed_behind_is_an_error(collected: Collector) -> None:
    async def breaks(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE)
        talk.writer.transport.abort()

    async with scripted(breaks) as server, serving([model(server.port)], tracing=Tracing(collected.url)) as served:
        await request_once(served.port, request(chat(stream=True)))
        await until(lambda: collected.spans)
    (span,) = collected.spans
    exported = plain(span.attributes)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert (exported["error.type"], exported["vllm_gateway.incomplete"]) == ("upstream_disconnected", "upstream")


async def test_a_request_outside_the_share_is_neither_exported_nor_traced_by_its_server(collected: Collector) -> None:
    async with traced(collected, 1e-12) as (served, server):
        await request_once(served.port, request(chat()))
        await request_once(served.port, with_header(request(chat()), f"traceparent: {TRACEPARENT}"))
        await until(lambda: len(served.context.records) == 2)
        served.worker.tick()
        own, continued = (sent.header("traceparent") for sent in server.requests)
    assert not collected.requests
    assert own is not None and re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", own)
    assert continued == f"00-{TRACE}-{PARENT}-00"


async def test_without_tracing_no_header_is_sent() -> None:
    async with scripted(responses) as server, serving([model(server.port)]) as served:
        await request_once(served.port, with_header(request(chat()), f"traceparent: {TRACEPARENT}"))
        assert server.requests[0].header("traceparent") is None
        assert served.context.records[0].trace is None


async def test_neither_key_nor_prompt_is_in_a_span(collected: Collector) -> None:
    async with traced(collected) as (served, _):
        for data in (
            request(chat(messages=[{"role": "user", "content": CANARY}], user=CANARY)),
            request(chat(model=f"sk-{CANARY}")),
            request(chat(), token=CANARY),
            request(b"{" + CANARY.encode()),
            with_header(request(chat()), f"traceparent: {CANARY}"),
        ):
            await request_once(served.port, data)
        await until(lambda: len(collected.spans) == 5)
    written = b"".join(each.SerializeToString() for each in collected.requests)
    assert CANARY.encode() not in written and KEY.encode() not in written


@each_row(
    "given",
    [
        "", "00", TRACEPARENT + "-00", TRACEPARENT.upper(), f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE[1:]}-{PARENT}-01", f"00-{TRACE}-{PARENT}", f"00-{TRACE}-{PARENT}-0g", TRACEPARENT + "\n",
    ],
)  # fmt: skip
def test_a_header_that_is_not_valid_counts_as_none(given: str) -> None:
    trace = Sampler(Tracing("-")).start_trace(given.encode())
    assert trace.parent is None and trace.trace_id != TRACE


@pytest.mark.parametrize("given", [TRACEPARENT, TRACEPARENT[:-2] + "00", f"cc-{TRACE}-{PARENT}-01-what-comes-later"])
def test_a_valid_one_is_continued(given: str) -> None:
    trace = Sampler(Tracing("-")).start_trace(given.encode())
    assert (trace.trace_id, trace.parent, trace.sampled) == (TRACE, PARENT, True)


@given(st.integers(1, (1 << 128) - 1), st.floats(1e-9, 1))
def test_the_share_is_decided_as_the_sdks_do(trace_id: int, share: float) -> None:
    ours = Sampler(Tracing("-", share)).start_trace(f"00-{trace_id:032x}-{PARENT}-01".encode())
    theirs = TraceIdRatioBased(share).should_sample(None, trace_id, "-").decision is Decision.RECORD_AND_SAMPLE
    assert ours.sampled == theirs


def test_the_words_are_those_of_the_conventions() -> None:
    exported = attributes(record(usage=Usage(1, 2, 3, 4), code="server_error", first_token=0.1, incomplete="upstream"), "https")
    conventions = {
        value
        for module in (gen_ai_attributes, http_attributes, url_attributes, error_attributes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    assert {name for name in exported if not name.startswith("vllm_gateway.")} - conventions == set()
    assert {"http.request.method", "url.path", "url.scheme"} <= set(exported), "what a server span of HTTP must have"
    assert exported["url.scheme"] == "https"
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {operation(each) for each in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")} <= operations
    assert all(operation(each) for each in ENDPOINTS)


def test_a_blocked_collector_delays_no_request(collected: Collector) -> None:
    collected.held.clear()
    trace = Sampler(Tracing("-")).start_trace(None)
    took = list[float]()
    gathered = Spans()
    gathered.endpoint = collected.url
    for _ in range(40):
        since = time.monotonic()
        for _ in range(1000):
            gathered.add(record(trace=trace))
        gathered.flush()
        took.append(time.monotonic() - since)
    assert max(took) < 9, "a request waited for the collector, which is given ten seconds for each batch"
    assert len(gathered._records) <= 2048
    collected.held.set()
    gathered.close(60)
    assert 2048 < len(collected.spans) < 40_000


def test_a_blocked_collector_with_a_full_queue_delays_the_stop_by_its_timeout(collected: Collector) -> None:
    collected.held.clear()
    trace = Sampler(Tracing("-")).start_trace(None)
    gathered = Spans()
    gathered.endpoint = collected.url
    gathered.add(record(trace=trace))
    gathered.flush()
    wait_for(gathered._waiting.empty)  # the thread exports the first batch, and waits for the collector
    while not gathered._records:  # until a flush finds the queue full
        gathered.add(record(trace=trace))
        gathered.flush()
    gathered.close(0.05)
    assert gathered._waiting.full() and gathered._records
    collected.held.set()
    wait_for(lambda: gathered._waiting.empty())
    gathered.close(60)
    assert not gathered._records


def test_a_collector_that_is_not_there_is_survived() -> None:
    with closing(Spans()) as gathered:
        gathered.endpoint = "http://127.0.0.1:1"
        gathered.add(record(trace=Sampler(Tracing("-")).start_trace(None)))
        gathered.flush()
    for thread in threading.enumerate():
        if thread.name == "spans":
            thread.join(30)
            assert not thread.is_alive()


def test_the_whole_gateway_exports_what_is_left_at_its_end(tmp_path: Path, collected: Collector) -> None:
    config = configuration(launched()) | {"tracing": {"endpoint": collected.url + "/"}}
    with gateway(tmp_path, config) as one:
        headers = {"authorization": f"Bearer {KEY}", "traceparent": TRACEPARENT}
        body = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}]}
        assert httpx2.post(one.url + "/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
        one.stop()
        wait_for(lambda: collected.spans)
        assert "has no effect" not in one.output
    (span,) = collected.spans
    assert (span.trace_id.hex(), span.name) == (TRACE, "chat sim/one")


def test_without_its_packages_the_setting_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(configuration(launched()) | {"tracing": {"endpoint": "http://collector:4318"}}))
    assert load(file).tracing is not None
    program = "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http'] = None; from gateway.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "check", str(file)], env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        "tracing.endpoint: tracing requires packages that are not installed: the extra `otel` (pip install 'vllm-gateway[otel]')"
        in done.stdout
    )
