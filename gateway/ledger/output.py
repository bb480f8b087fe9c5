"""Print usage for people and for programs: a table with bars, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.ledger.queries import UsageReport, UsageSum

_BAR = 24  # columns
_DECIMALS = (2, 9)
_MEASURES = ("requests", "incomplete", "estimated", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "cost")


def as_json(report: UsageReport, console: Console) -> None:
    """Print the report as JSON."""
    console.file.write(json.dumps(report.document(), indent=2) + "\n")


def as_csv(report: UsageReport, console: Console) -> None:
    """Print a line for each sum; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*report.query.by, *_MEASURES])
    writer.writerows([*each.group, *(_plain(getattr(each, name)) for name in _MEASURES)] for each in report.sums)
    console.file.write(text.getvalue())


def _plain(number: float | None) -> str | float | None:
    """Write a number without an exponent: not every program that reads CSV knows ``3.4e-05``."""
    return f"{Decimal(repr(number)):f}" if isinstance(number, float) else number


def as_table(report: UsageReport, console: Console) -> None:
    """Print a table: a bar shows each line's share of the largest one's tokens. Costs appear if any model has a price."""
    query = report.query
    console.print(f"usage from {query.since:%Y-%m-%d %H:%M} to {query.until:%Y-%m-%d %H:%M} UTC", style="dim")
    if not report.sums:
        console.print("nothing")
        return
    costs = [each.cost for each in report.sums if each.cost is not None]
    decimals = cost_decimals(costs)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in query.by:
        table.add_column(name, overflow="fold")
    for name in ("requests", "incomplete", "prompt", "cached", "completion", "reasoning", *(("cost",) if costs else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    largest = max(map(_tokens, report.sums)) or 1
    for each in report.sums:
        numbers = [*_numbers(each), *([_cost(each, decimals)] if costs else [])]
        table.add_row(*(Text(part or "-") for part in each.group), *numbers, Bar(largest, 0, _tokens(each), width=_BAR))
    console.print(table)
    if any(each.estimated for each in report.sums):
        console.print("~ some of the completion tokens are estimated: those of truncated streams", style="dim")


def _numbers(each: UsageSum) -> list[str]:
    mark = "~" if each.estimated else ""
    shown = [f"{each.requests:,}", f"{each.incomplete:,}", f"{each.prompt_tokens:,}", f"{each.cached_tokens:,}"]
    return [*shown, f"{mark}{each.completion_tokens:,}", f"{each.reasoning_tokens:,}"]


def _cost(each: UsageSum, decimals: int) -> str:
    return "-" if each.cost is None else f"{'~' if each.estimated else ''}{each.cost:,.{decimals}f}"


def cost_decimals(costs: Iterable[float]) -> int:
    """Return the decimals of a column of costs so that the smallest shows two digits: 2 to 9, as the ledger counts billionths."""
    smallest = min((cost for cost in costs if cost > 0), default=1.0)
    return min(max(_DECIMALS[0], 1 - math.floor(math.log10(smallest))), _DECIMALS[1])


def _tokens(each: UsageSum) -> int:
    return each.prompt_tokens + each.completion_tokens


FORMATS: Mapping[str, Callable[[UsageReport, Console], None]] = {"table": as_table, "csv": as_csv, "json": as_json}
"""The output formats of usage."""
