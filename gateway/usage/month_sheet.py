"""Print a closed month for finance: by team, cost center and model, as a table, CSV, HTML or JSON.

The rules: corrections are separate lines, each with the time at which they arrived. Costs have all of their digits. A text that a
spreadsheet would treat as a formula is quoted.
"""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

COUNTS = ("requests", "incomplete", "estimated", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
_GROUP = ("team", "cost_center", "model")
HEADER = ("month", *_GROUP, *COUNTS, "cost", "arrived")
"""The columns of a sheet. ``arrived`` is empty for the lines of the closed report."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SheetLine:
    """One line of a sheet. ``group``: team, cost center, model. ``cost`` is None if no request had a price."""

    group: tuple[str | None, ...]
    counts: tuple[int, ...]
    cost: Decimal | None
    arrived: str | None = None


def sheet(document: Document, cost_center: str) -> list[SheetLine]:
    """Return the lines of a closed month, then its corrections. ``cost_center`` is the label that names the cost center of a key."""
    return [*_summed(document["lines"], cost_center), *_summed(document["corrections"], cost_center)]


def _summed(lines: Sequence[str], cost_center: str) -> Iterator[SheetLine]:
    found: dict[tuple[str, ...], SheetLine] = {}
    for text in lines:
        line = json.loads(text)
        group = (line["team"], line["labels"].get(cost_center), line["model"])
        cost = None if line["cost"] is None else Decimal(line["cost"])
        own = SheetLine(group, tuple(line[name] for name in COUNTS), cost, line.get("late"))
        order = (own.arrived or "", *(part or "" for part in group), *("" if part is None else "named" for part in group))
        found[order] = own if order not in found else _sum(found[order], own)
    return (found[order] for order in sorted(found))


def _sum(one: SheetLine, other: SheetLine) -> SheetLine:
    costs = [cost for cost in (one.cost, other.cost) if cost is not None]
    counts = tuple(left + right for left, right in zip(one.counts, other.counts, strict=True))
    return SheetLine(one.group, counts, sum(costs, Decimal()) if costs else None, one.arrived)


def _total(lines: Sequence[SheetLine]) -> SheetLine | None:
    total: SheetLine | None = None
    for line in lines:
        total = line if total is None else _sum(total, line)
    return total


def _cells(line: SheetLine) -> tuple[str, ...]:
    cost = "" if line.cost is None else f"{line.cost:f}"
    return (*(part or "" for part in line.group), *map(str, line.counts), cost, line.arrived or "")


def as_json(document: Document, _: str, console: Console) -> None:
    """Print the whole document: its lines are the texts that are hashed, by key, team, model and labels."""
    console.file.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def as_lines(document: Document, _: str, console: Console) -> None:
    """Print the lines that are hashed, so that ``sha256sum`` shows the hash of the month."""
    console.file.write("".join(f"{line}\n" for line in document["lines"]))


def as_csv(document: Document, cost_center: str, console: Console) -> None:
    """Print a line for each team, cost center and model."""
    writer = csv.writer(console.file, lineterminator="\n")
    writer.writerow(HEADER)
    for line in sheet(document, cost_center):
        writer.writerow([document["month"], *map(_quoted, _cells(line))])


def _quoted(text: str) -> str:
    """Return a text that a spreadsheet does not treat as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def as_html(document: Document, cost_center: str, console: Console) -> None:
    """Print a page with one table, which spreadsheets open as a sheet."""
    lines = sheet(document, cost_center)
    rows = [[document["month"], *_cells(line)] for line in lines]
    if (total := _total(lines)) is not None:
        rows.append(["total", "", "", "", *_cells(total)[len(_GROUP) : -1], ""])
    title = html.escape(f"Usage of {document['month']}")
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_quoted(cell))}</td>" for cell in row) + "</tr>\n" for row in rows)
    head = "".join(f"<th>{name}</th>" for name in HEADER)
    closed = html.escape(f"Closed {document['closed']}, SHA-256 {document['hash']}")
    console.file.write(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>\n<h1>{title}</h1>\n'
        f"<p>{closed}</p>\n<table>\n<tr>{head}</tr>\n{body}</table>\n</body></html>\n"
    )


def as_table(document: Document, cost_center: str, console: Console) -> None:
    """Print a table, the hash, and whether the stored report still has it."""
    lines = sheet(document, cost_center)
    has_corrections = bool(document["corrections"])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEADER[1 : None if has_corrections else -1]:
        table.add_column(name.removesuffix("_tokens"), justify="left" if name in (*_GROUP, "arrived") else "right", overflow="fold")
    for line in lines:
        cells = _cells(line)
        table.add_row(*(Text(cell or "-") for cell in (cells if has_corrections else cells[:-1])))
    if len(lines) > 1 and (total := _total(lines)) is not None:
        cells = ("total", "", "", *_cells(total)[len(_GROUP) : -1])
        table.add_row(*(Text(cell) for cell in ((*cells, "") if has_corrections else cells)), style="bold")
    console.print(table if lines else "no requests")
    console.print(f"{document['month']} was closed at {document['closed']}", style="dim")
    console.print(f"sha256 {document['hash']}", style="dim")


FORMATS: Mapping[str, Callable[[Document, str, Console], None]] = {
    "table": as_table,
    "csv": as_csv,
    "html": as_html,
    "json": as_json,
    "lines": as_lines,
}
"""The output formats of a closed month."""
