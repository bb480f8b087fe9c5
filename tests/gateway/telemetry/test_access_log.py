"""The access log does not wait for its reader, and no request waits for the log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from gateway.api.usage import Usage
from gateway.telemetry.access_log import AccessLog, access_log, line
from gateway.telemetry.request_record import Continuation
from tests.gateway.telemetry.test_metrics import record
from tests.support.process import configuration, gateway, launched, wait_for
from tests.support.running import KEY, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, chat, request, request_once


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    descriptors = os.pipe()
    yield descriptors
    for end in descriptors:
        try:
            os.close(end)
        except OSError:
            pass


def read(end: int, count: int) -> bytes:
    """So many lines, as soon as they have been written."""
    data = b""
    while data.count(b"\n") < count:
        data += os.read(end, 1 << 20)
    return data


def wait_for_the_writers() -> None:
    """Closing the log waits for its thread, but not without a limit, since a suspended machine may take longer."""
    for thread in threading.enumerate():
        if thread.name == "access-log":
            thread.join(30)


def lines(data: bytes) -> list[dict[str, object]]:
    return [orjson.loads(each) for each in data.splitlines()]


def test_a_line() -> None:
    written = line(record(started=1_760_000_000.25, usage=Usage(3, 2, 1, 0), duration=0.25, first_byte=0.125, code="x", detail="a\nb"))
    assert written.endswith(b"}\n") and written.count(b"\n") == 1
    assert orjson.loads(written) == {
        "time": "2025-10-09T08:53:20.250000Z", "request_id": "req_1", "key": "team-a", "endpoint": "/v1/chat/completions", "model": "tiny",
        "server": "tiny#0", "status": 200, "code": "x", "request_bytes": 1, "response_bytes": 2, "prompt_tokens": 3, "completion_tokens": 2,
        "cached_tokens": 1, "queue_ms": 0.0, "first_byte_ms": 125.0, "total_ms": 250.0, "detail": "a\nb",
    }  # fmt: skip


def test_the_line_of_a_request_that_waited_says_why() -> None:
    written = orjson.loads(line(record(queued=0.5, queue_reason="full")))
    assert (written["queue_ms"], written["queue_reason"]) == (500.0, "full")
    assert "queue_reason" not in orjson.loads(line(record()))


def test_the_line_of_a_continued_stream_has_its_servers() -> None:
    lost = (
        Continuation("m#0", "moved", "token_ids", "continued", 0.3125, 2, 130, sampled=True),
        Continuation("m#1", "aborted", "p", "failed"),
    )
    (shown,) = lines(line(record(continuations=lost)))
    first = {"server": "m#0", "cause": "moved", "path": "token_ids", "outcome": "continued", "lost_tokens": 2, "prompt_tokens": 130}
    second = {"server": "m#1", "cause": "aborted", "path": "p", "outcome": "failed", "lost_tokens": 0, "prompt_tokens": 0}
    assert shown["continuations"] == [{**first, "sampled": True, "gap_ms": 312.5}, second]


def test_what_is_there_is_written_at_the_end(pipe: tuple[int, int]) -> None:
    with access_log(pipe[1]) as log:
        for n in range(100):
            log.add(record(id=f"req_{n}"))
            if n % 7 == 0:
                log.flush()
    assert [each["request_id"] for each in lines(read(pipe[0], 100))] == [f"req_{n}" for n in range(100)]
    assert log.dropped == 0


def test_a_blocked_reader_delays_no_request(pipe: tuple[int, int]) -> None:
    since = time.monotonic()
    with access_log(pipe[1]) as log:
        for _ in range(300):
            for _ in range(500):
                log.add(record())
            log.flush()
        assert time.monotonic() - since < 30, "a request waited for the log"
        assert log.dropped > 50_000, "lines are dropped"
        assert len(log._lines) <= 10_000
        since = time.monotonic()
    assert time.monotonic() - since < 30, "the end waited for the log"
    os.close(pipe[0])  # lets the writer go, before another test is given the same descriptors
    log.stop(30.0)
    wait_for_the_writers()


def test_a_closed_reader_causes_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with access_log(pipe[1]) as log:
        for _ in range(3):
            log.add(record())
            log.flush()
    wait_for_the_writers()
    assert log.dropped == 3


def test_an_output_that_was_never_open_causes_no_error() -> None:
    with access_log(1 << 20) as log:
        log.add(record())
    wait_for_the_writers()
    assert log.dropped == 1


def test_a_line_that_cannot_be_made_costs_itself_alone(pipe: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with access_log(pipe[1]) as log:
        for user in ("a", "\ud800", "b"):
            log.add(record(user=user))
        log.flush()
        log.add(record(user="c"))
    assert [each["user"] for each in lines(read(pipe[0], 3))] == ["a", "b", "c"]
    wait_for_the_writers()
    assert log.dropped == 1 and "a line of the access log" in caplog.text


def test_operators_see_what_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "stdout").symlink_to("/dev/full")  # a disk without room
    with gateway(tmp_path, configuration(launched())) as one:
        assert one.metric("vllm_gateway_log_lines_dropped_total") == 0
        for _ in range(3):
            assert one.request().status_code == 200
        wait_for(lambda: one.metric("vllm_gateway_log_lines_dropped_total") == 3)


def test_a_reader_that_gets_on_gets_the_rest(pipe: tuple[int, int]) -> None:
    seen: list[bytes] = []

    def read_all() -> None:
        while data := os.read(pipe[0], 1 << 16):
            seen.append(data)

    with access_log(pipe[1]) as log:
        for n in range(20_000):
            log.add(record(id=f"req_{n}"))
            if n % 1000 == 0:
                log.flush()
        reader = threading.Thread(target=read_all)
        reader.start()
    wait_for_the_writers()
    os.close(pipe[1])
    reader.join(30)
    assert [each["request_id"] for each in lines(b"".join(seen))] == [f"req_{n}" for n in range(20_000 - log.dropped)]


def test_what_gathers_is_bounded() -> None:
    log = AccessLog(-1)
    for _ in range(10_010):
        log.add(record())
    assert (len(log._lines), log.dropped) == (10_000, 10)


async def test_neither_key_nor_prompt_is_in_it() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    canary = "canary-4711"
    async with scripted(script) as server, serving([model(server.port)]) as served:
        for data in (
            request(chat(messages=[{"role": "user", "content": canary}])),
            request(chat(model=f"sk-{canary}")),
            request(token=canary),
            request(path=f"/v1/{KEY}?{canary}"),
            request(b"{" + canary.encode()),
        ):
            await request_once(served.port, data)
        await until(lambda: len(served.context.records) == 5)
        written = b"".join(line(each) for each in served.context.records)
        assert canary.encode() not in written and KEY.encode() not in written
