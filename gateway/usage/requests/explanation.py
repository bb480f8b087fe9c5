"""Explain a request in sentences: its events in their order, and why it failed. Pure.

The rule: a terminal and a page show the same texts. Some of them come from clients, so control characters are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from gateway.usage.requests.causes import CAUSES, OF_ENDS, OF_QUEUES

_CLIENT_CLOSED, _SERVER_ERROR = 499, 500
Request = Mapping[str, Any]
_LOST = re.compile(
    r"(?P<server>\S.*?) (?P<cause>\w+) (?:token_ids|regeneration) (?P<outcome>continued|failed|different)(?P<sampled> sampled)?(?:, |$)"
)
"""A part of the column ``continuations``, as ``Continuation`` writes it."""
_OUTCOMES = {
    "continued": "another server continued the stream",
    "failed": "no other server could continue the stream",
    "different": "another server made a different response, so the stream ended",
}


def explained(request: Request) -> dict[str, Any]:
    """Return a request with its texts, as JSON for an encoder of msgspec."""
    return {
        "request": request,
        "outcome": outcome(request),
        "causes": list(causes(request)),
        "time_line": [{"time": moment.isoformat(), "text": text} for moment, text in time_line(request)],
        "facts": list(facts(request)),
    }


def outcome(request: Request) -> str:
    """Return how a request ended, in some words."""
    status, code, incomplete = request["status"], request["code"], request["incomplete"]
    if code is not None:
        return f"{'failed' if status is None or status >= _SERVER_ERROR or incomplete is not None else 'rejected'} with {code} ({status})"
    if incomplete is not None:
        return f"ended early ({status})" if status is not None else "ended early"
    return f"succeeded ({status})"


def causes(request: Request) -> Iterator[str]:
    """Yield why a request failed, the meaning of its code first. Nothing if it succeeded."""
    code, detail, holder = request["code"], request["detail"], request["limit_holder"]
    if code is not None:
        yield CAUSES.get(code, "An error of another version of the gateway.")
    elif request["incomplete"] is not None:
        yield OF_ENDS.get(request["incomplete"], "")
    if holder is not None:
        yield f"limit: {printable(request['reason'])} of {printable(holder)}"
    elif code is not None and request["reason"] is not None:
        yield OF_QUEUES.get(request["reason"]) or f"reason: {printable(request['reason'])}"
    if request["param"] is not None:
        yield f"field: {printable(request['param'])}"
    if request["requested_model"] is not None:
        yield f"requested model: {printable(request['requested_model'])}"
    if detail is not None:
        yield f"detail: {printable(detail)}"


def time_line(request: Request) -> Iterator[tuple[datetime, str]]:
    """Yield what happened, each with its time: as far as times are known, in their order."""
    start = moment_of(request)
    yield start, f"received on {printable(request['endpoint'])} {_sender(request)}"
    after = start
    if request["queued_ms"]:
        after = start + timedelta(milliseconds=request["queued_ms"])
        yield after, f"left the queue of the model after {_seconds(request['queued_ms'])}"
    lost = list(_LOST.finditer(request["continuations"] or ""))
    during = [f"{each['server']} {each['cause']}" for each in lost]
    before = [each for each in (request["failures"] or "").split(", ") if each and each not in during]
    if before:
        yield after, f"servers failed: {printable(', '.join(before))}"
    if request["server"] is not None or lost:
        again = f", after {request['retries']} more attempt{'s' if request['retries'] > 1 else ''}" if request["retries"] else ""
        yield after, f"sent to {printable(lost[0]['server'] if lost else request['server'])}{again}"
    if request["first_token_ms"] is not None:
        after = start + timedelta(milliseconds=request["first_token_ms"])
        yield after, f"first event after {_seconds(request['first_token_ms'])}"
    for each in lost:
        yield after, f"later {printable(_loss(each))}"
    if request["total_ms"] is not None:
        ended = start + timedelta(milliseconds=request["total_ms"])
        end = "the client disconnected" if request["status"] == _CLIENT_CLOSED else f"ended with status {request['status']}"
        yield ended, f"{end} after {_seconds(request['total_ms'])}"


def _loss(lost: re.Match[str]) -> str:
    loss = "was drained" if lost["cause"] == "moved" else f"was lost ({lost['cause'].replace('_', ' ')})"
    drawn = ", as another draw" if lost["sampled"] else ""
    return f"{lost['server']} {loss}, and {_OUTCOMES[lost['outcome']]}{drawn}"


def _sender(request: Request) -> str:
    if request["key"] is None:
        return f"without a valid key, from {printable(request['client'] or 'an unknown address')}"
    parts = [f"with the key {request['key']}", *(f"{name} {request[name]}" for name in ("team", "user") if request[name] is not None)]
    return printable(", ".join(parts))


def facts(request: Request) -> Iterator[str]:
    """Yield what a request used, and its labels."""
    if request["model"] is not None:
        yield f"model: {printable(request['model'])}{', streamed' if request['stream'] else ''}"
    if request["prompt_tokens"] is not None or request["completion_tokens"] is not None:
        names = ("prompt", "cached", "completion", "reasoning")
        counts = ", ".join(f"{request[f'{name}_tokens']} {name}" for name in names if request[f"{name}_tokens"])
        by = f" (estimated by {request['estimated_by']})" if request["estimated_by"] else ""
        yield f"tokens: {counts or 'none'}{by}"
    if request["cost"] is not None:
        yield f"cost: {bytes(request['cost']).decode()}"
    if request["nearest_limit"] is not None:
        yield f"nearest limit: {printable(request['nearest_limit'])}"
    if request["trace_id"] is not None:
        yield f"trace: {request['trace_id']}"
    if request["labels"]:
        yield f"labels: {printable(', '.join(f'{name}={value}' for name, value in sorted(request['labels'].items())))}"


def moment_of(request: Request) -> datetime:
    """Return the time at which a request was received."""
    return datetime.fromisoformat(request["time"])


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:,.3f} s"


def printable(value: object) -> str:
    """Return a value as text without control characters."""
    return "" if value is None else "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value))
