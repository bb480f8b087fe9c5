"""The stored form of a record: the body of a response, however it was framed and written."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.recording.capture import Capture, Memory
from gateway.recording.document import body_pieces, data_in, document
from gateway.recording.redaction import NotParsedError, Redactor
from gateway.telemetry.request_record import RequestRecord
from tests.support.wire import DONE, EVENTS, delta

HEAD = b"HTTP/1.1 200 OK\r\nx-request-id: req_1\r\ncontent-type: text/event-stream\r\n"
CHUNKED, LENGTH = HEAD + b"transfer-encoding: chunked\r\n\r\n", HEAD + b"content-length: 9\r\n\r\n"
SECRET = "hidden-value"
BODIES = st.lists(
    st.binary(min_size=1, max_size=20) | st.sampled_from([b"0\r\n\r\n", b"\r\n\r\n", b"5\r\nabcde\r\n"]), min_size=1, max_size=6
)


class Sent:
    """The body that a server got."""

    def encode(self, served_model: str) -> bytes:
        return orjson.dumps({"model": served_model, "prompt": "a"})


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def capture(body: bytes, *written: bytes, stream: bool = False) -> Capture:
    """Return a complete capture. The times of its writes are 1, 2, …"""
    made = Capture("/v1/completions", 0.0, body, Sent(), Memory(10**6), lambda _: None, lambda _: None)
    made.pieces = [(float(n + 1), data) for n, data in enumerate(written)]
    made.served_model, made.is_event_stream = "served", stream
    return made


def written(made: Capture, *redact: str, status: int = 200) -> bytes:
    record = RequestRecord("req_1", 0.0, "completions", status)
    return document(made, record, Redactor(redact))


@given(BODIES)
def test_chunks_become_the_body(bodies: list[bytes]) -> None:
    first, *rest = bodies
    writes = [CHUNKED + framed(first), *map(framed, rest), b"0\r\n\r\n"]
    assert list(body_pieces(enumerate(map(bytes, writes)))) == list(enumerate(bodies))


@given(BODIES)
def test_a_body_with_a_length_stays(bodies: list[bytes]) -> None:
    assert b"".join(data for _, data in body_pieces(enumerate([LENGTH, *bodies]))) == b"".join(bodies)
    assert b"".join(data for _, data in body_pieces(enumerate([LENGTH + bodies[0], *bodies[1:]]))) == b"".join(bodies)


@given(st.binary(max_size=50))
def test_any_bytes_are_stored(body: bytes) -> None:
    made = orjson.loads(written(capture(b'{"prompt":"b"}', LENGTH + body)))
    assert data_in(made["response"]) == body


def test_what_was_sent_is_stored_if_it_differs() -> None:
    same = orjson.loads(written(capture(b'{"prompt": "a", "model": "served"}', LENGTH + b"{}")))
    other = orjson.loads(written(capture(b'{"prompt": "a", "model": "alias"}', LENGTH + b"{}")))
    assert (same["sent"], other["sent"]) == (None, {"text": '{"model":"served","prompt":"a"}'})


@given(st.integers(1, 9), st.integers(0, 3))
def test_a_redacted_field_of_a_stream_is_in_no_piece(size: int, extra: int) -> None:
    events = b"".join((*EVENTS[:-1], delta(f'{{"content":"{SECRET}"}}'), *[delta('{"content":"more"}')] * extra, DONE))
    pieces = [events[start : start + size * 20] for start in range(0, len(events), size * 20)]  # cut anywhere
    made = capture(b'{"prompt":"b"}', CHUNKED, *map(framed, pieces), b"0\r\n\r\n", stream=True)
    stored = written(made, "content")
    assert SECRET.encode() not in stored
    assert "".join(each["text"] for each in orjson.loads(stored)["response"]["events"]).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("rest", [b'data: {"content":"hidden', b"data: hidden-value\n\n", b'data: ["hidden-value"]\n\n'])
def test_a_stream_that_cannot_be_redacted_is_not_stored(rest: bytes) -> None:
    made = capture(b'{"prompt":"b"}', CHUNKED, framed(EVENTS[0]), framed(rest), stream=True)
    with pytest.raises(NotParsedError):
        written(made, "content")


@pytest.mark.parametrize("body", [b'{"text":"hidden', b"hidden-value", b"RIFF\x00\xff"])
def test_a_response_that_cannot_be_redacted_is_not_stored(body: bytes) -> None:
    with pytest.raises(NotParsedError):
        written(capture(b'{"prompt":"b"}', LENGTH + body), "content")


def test_headers_are_not_stored() -> None:
    stored = written(capture(b'{"prompt":"b"}', HEAD + b"x-secret: hidden-value\r\ncontent-length: 2\r\n\r\n", b"{}"))
    assert SECRET.encode() not in stored
    assert b"x-secret" not in stored
