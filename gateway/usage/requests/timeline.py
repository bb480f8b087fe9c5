"""Print requests for people and for programs: a table, the time line of one request in words, JSON.

The rule: ``explanation`` makes the texts, without control characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.usage.requests.explanation import Request, causes, facts, moment_of, outcome, printable, time_line

_COLUMNS = ("time", "id", "key", "user", "model", "server", "status", "code", "reason", "total_ms", "tokens")
_RIGHT = frozenset({"status", "total_ms", "tokens"})
_OPTIONAL = frozenset({"user", "code", "reason"})
"""The columns that are shown only if a request has a value."""


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
    cells = {name: printable(request.get(name)) for name in _COLUMNS}
    tokens = [request["prompt_tokens"], request["completion_tokens"]]
    cells["tokens"] = "" if tokens == [None, None] else "+".join(str(count or 0) for count in tokens)
    cells["time"] = moment_of(request).strftime("%Y-%m-%d %H:%M:%S")
    cells["total_ms"] = "" if request["total_ms"] is None else f"{request['total_ms']:,.0f}"
    return cells


def as_timeline(request: Request, console: Console) -> None:
    """Print what happened to a request: its cause first, if it failed, then a time line."""
    console.print(Text(f"{printable(request['id'])}: {outcome(request)}", style="bold"))
    for line in causes(request):
        console.print(Text(line))
    console.print()
    for moment, text in time_line(request):
        console.print(Text(f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}  {text}"))
    if lines := list(facts(request)):
        console.print()
    for line in lines:
        console.print(Text(line))
