"""Print requests for people and for programs: a table, the time line of one request in words, JSON.

The rule: some texts come from clients, so control characters never reach a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.usage.requests.causes import CAUSES, OF_ENDS

_COLUMNS = ("time", "id", "key", "user", "model", "server", "status", "code", "reason", "total_ms", "tokens")
_RIGHT = frozenset({"status", "total_ms", "tokens"})
_OPTIONAL = frozenset({"user", "code", "reason"})
"""The columns that are shown only if a request has a value."""
_CLIENT_CLOSED = 499
Request = Mapping[str, Any]


def parse_page(document: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a gateway's JSON page, whose numbers with decimals must be ``Decimal``: a cost keeps all of its digits."""
    return {**document, "requests": [{name: _number(name, value) for name, value in each.items()} for each in document["requests"]]}


def _number(name: str, value: Any) -> Any:
    if name == "cost" and value is not None:
        return msgspec.Raw(f"{Decimal(value):f}".encode())
    return float(value) if isinstance(value, Decimal) else value


def as_json(document: Mapping[str, Any], console: Console) -> None:
    """Print a page as JSON."""
    console.file.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def as_table(requests: Sequence[Request], console: Console) -> None:
    """Print a line for each request, the newest first."""
    if not requests:
        console.print("no requests")
        return
    cells = [_cells(each) for each in requests]
    shown = [name for name in _COLUMNS if name not in _OPTIONAL or any(each[name] for each in cells)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in shown:
        justify: Literal["left", "right"] = "right" if name in _RIGHT else "left"
        table.add_column(name.removesuffix("_ms") if name == "total_ms" else name, justify=justify, overflow="fold")
    for each in cells:
        table.add_row(*(Text(each[name] or "-") for name in shown))
    console.print(table)


def _cells(request: Request) -> dict[str, str]:
    cells = {name: _printable(request.get(name)) for name in _COLUMNS}
    tokens = [request["prompt_tokens"], request["completion_tokens"]]
    cells["tokens"] = "" if tokens == [None, None] else "+".join(str(count or 0) for count in tokens)
    cells["time"] = _moment(request).strftime("%Y-%m-%d %H:%M:%S")
    cells["total_ms"] = "" if request["total_ms"] is None else f"{request['total_ms']:,.0f}"
    return cells


def as_timeline(request: Request, console: Console) -> None:
    """Print what happened to a request: its cause first, if it failed, then a time line."""
    console.print(Text(f"{_printable(request['id'])}: {_outcome(request)}", style="bold"))
    for line in _causes(request):
        console.print(Text(line))
    console.print()
    for moment, text in _time_line(request):
        console.print(Text(f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}  {text}"))
    if facts := list(_facts(request)):
        console.print()
    for line in facts:
        console.print(Text(line))


def _outcome(request: Request) -> str:
    status, code, incomplete = request["status"], request["code"], request["incomplete"]
    if code is not None:
        return f"failed with {code} ({status})"
    if incomplete is not None:
        return f"ended early ({status})" if status is not None else "ended early"
    return f"succeeded ({status})"


def _causes(request: Request) -> Iterator[str]:
    code, detail, holder = request["code"], request["detail"], request["limit_holder"]
    if code is not None:
        yield CAUSES.get(code, "An error of another version of the gateway.")
    elif request["incomplete"] is not None:
        yield OF_ENDS.get(request["incomplete"], "")
    if holder is not None:
        yield f"limit: {_printable(request['reason'])} of {_printable(holder)}"
    elif code is not None and request["reason"] is not None:
        yield f"reason: {_printable(request['reason'])}"
    if request["param"] is not None:
        yield f"field: {_printable(request['param'])}"
    if request["requested_model"] is not None:
        yield f"requested model: {_printable(request['requested_model'])}"
    if detail is not None:
        yield f"detail: {_printable(detail)}"


def _time_line(request: Request) -> Iterator[tuple[datetime, str]]:
    """Yield what happened, each with its time: as far as times are known, in their order."""
    start = _moment(request)
    yield start, f"received on {_printable(request['endpoint'])} {_sender(request)}"
    after = start
    if request["queued_ms"]:
        after = start + timedelta(milliseconds=request["queued_ms"])
        yield after, f"left the queue of the model after {_seconds(request['queued_ms'])}"
    if request["failures"] is not None:
        yield after, f"servers failed: {_printable(request['failures'])}"
    if request["server"] is not None:
        again = f", after {request['retries']} more attempt{'s' if request['retries'] > 1 else ''}" if request["retries"] else ""
        yield after, f"sent to {_printable(request['server'])}{again}"
    if request["first_token_ms"] is not None:
        yield start + timedelta(milliseconds=request["first_token_ms"]), f"first event after {_seconds(request['first_token_ms'])}"
    if request["total_ms"] is not None:
        ended = start + timedelta(milliseconds=request["total_ms"])
        end = "the client disconnected" if request["status"] == _CLIENT_CLOSED else f"ended with status {request['status']}"
        yield ended, f"{end} after {_seconds(request['total_ms'])}"


def _sender(request: Request) -> str:
    if request["key"] is None:
        return f"without a valid key, from {_printable(request['client'] or 'an unknown address')}"
    parts = [f"with the key {request['key']}", *(f"{name} {request[name]}" for name in ("team", "user") if request[name] is not None)]
    return _printable(", ".join(parts))


def _facts(request: Request) -> Iterator[str]:
    if request["model"] is not None:
        yield f"model: {_printable(request['model'])}{', streamed' if request['stream'] else ''}"
    if request["prompt_tokens"] is not None or request["completion_tokens"] is not None:
        names = ("prompt", "cached", "completion", "reasoning")
        counts = ", ".join(f"{request[f'{name}_tokens']} {name}" for name in names if request[f"{name}_tokens"])
        by = f" (estimated by {request['estimated_by']})" if request["estimated_by"] else ""
        yield f"tokens: {counts or 'none'}{by}"
    if request["cost"] is not None:
        yield f"cost: {bytes(request['cost']).decode()}"
    if request["nearest_limit"] is not None:
        yield f"nearest limit: {_printable(request['nearest_limit'])}"
    if request["labels"]:
        yield f"labels: {_printable(', '.join(f'{name}={value}' for name, value in sorted(request['labels'].items())))}"


def _moment(request: Request) -> datetime:
    return datetime.fromisoformat(request["time"])


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:,.3f} s"


def _printable(value: object) -> str:
    """Return a value as text without control characters."""
    return "" if value is None else "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value))
