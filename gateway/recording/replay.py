"""Send a recorded request again, through the gateway, and return both outcomes."""

from __future__ import annotations

from time import monotonic
from typing import Any

import httpx2
import orjson

from gateway.recording.document import data_in
from gateway.recording.outcome import Outcome, content_of
from gateway.recording.reading import RecordError

_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)
_EXTRA = "extra_body"


def recorded_outcome(record: dict[str, Any]) -> Outcome:
    """Return the outcome of a stored record."""
    response = record["response"]
    events = response.get("events")
    body = data_in(response) if events is None else b"".join(data_in(each) for each in events)
    content = content_of(record["path"], body, is_stream=events is not None)
    return Outcome(
        id=record["id"],
        model=record["model"],
        status=response["status"],
        error=content.error,
        text=content.text,
        tool_calls=content.tool_calls,
        usage=content.usage,
        first_byte=record["first_byte"],
        duration=record["duration"],
    )


def request_body(record: dict[str, Any], model: str | None) -> bytes:
    """Return the body to send: the recorded one, for this model unless it is None. Raises RecordError."""
    try:
        document = orjson.loads(data_in(record["request"]))
    except orjson.JSONDecodeError as error:
        raise RecordError("the recorded body is not JSON") from error
    if model is not None:
        document["model"] = model
        if isinstance(extra := document.get(_EXTRA), dict):
            extra.pop("model", None)  # it would take precedence
    return orjson.dumps(document)


def replay(record: dict[str, Any], model: str | None, url: str, key: str | None) -> Outcome:
    """Send a recorded request again. Raises RecordError, and httpx2.HTTPError if the gateway does not respond."""
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    body = request_body(record, model)
    first_byte: float | None = None
    pieces = []
    started = monotonic()
    with httpx2.Client(timeout=_TIMEOUT) as client, client.stream("POST", url + record["path"], content=body, headers=headers) as response:
        for piece in response.iter_bytes():
            first_byte = monotonic() - started if first_byte is None else first_byte
            pieces.append(piece)
    duration = monotonic() - started
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    content = content_of(record["path"], b"".join(pieces), is_stream=is_stream)
    return Outcome(
        id=response.headers.get("x-request-id", ""),
        model=orjson.loads(body).get("model"),
        status=response.status_code,
        error=content.error,
        text=content.text,
        tool_calls=content.tool_calls,
        usage=content.usage,
        first_byte=first_byte,
        duration=duration,
    )
