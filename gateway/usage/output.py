"""Print usage for people and for programs: a table with bars, CSV, JSON. Costs are exact decimals in every format."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.snapshot.money import decimal_of, decimal_text
from gateway.usage.queries import MEASURES, UsageReport, UsageSum
from gateway.usage.reconciliation_queries import Reconciliation

_BAR = 24  # columns
_SHOWN = ("requests", "incomplete", "estimated", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
_MIN_DECIMALS = 2


def as_json(report: UsageReport | Reconciliation, console: Console) -> None:
    """Print the report as JSON."""
    console.file.write(msgspec.json.format(msgspec.json.encode(report.document()), indent=2).decode() + "\n")


def as_csv(report: UsageReport, console: Console) -> None:
    """Print a line for each sum; unknown values are empty. Costs have no exponent, which not every program reads."""
    writer = csv.writer(console.file, lineterminator="\n")
    writer.writerow([*report.query.by, *MEASURES, "cost"])
    for each in report.sums:
        writer.writerow([*each.group, *(getattr(each, name) for name in MEASURES), None if each.cost is None else decimal_text(each.cost)])


def as_table(report: UsageReport, console: Console) -> None:
    """Print a table: a bar shows each line's share of the largest one's tokens. Costs appear if any model has a price."""
    query = report.query
    console.print(f"usage from {query.since:%Y-%m-%d %H:%M} to {query.until:%Y-%m-%d %H:%M} UTC", style="dim")
    if not report.sums:
        console.print("no requests")
        return
    costs = [each.cost for each in report.sums if each.cost is not None]
    decimals = cost_decimals(costs) if costs else None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in query.by:
        table.add_column(name, overflow="fold")
    for name in (*_SHOWN, *(("cost",) if costs else ())):
        table.add_column(name.removesuffix("_tokens"), justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    largest = max(map(_tokens, report.sums)) or 1
    for each in report.sums:
        table.add_row(*(Text(part or "-") for part in each.group), *_numbers(each, decimals), Bar(largest, 0, _tokens(each), width=_BAR))
    if len(report.sums) > 1:
        total = _total(report.sums, len(query.by))
        table.add_row(*(Text(part or "") for part in total.group), *_numbers(total, decimals), style="bold")
    console.print(table)
    if costs:
        console.print("cost: in the currency of models[].price", style="dim")
    if report.estimated_by:
        console.print(_estimates(report), style="dim")


def _total(sums: Sequence[UsageSum], columns: int) -> UsageSum:
    """Return the sum of all rows. Its cost is the sum over the rows that have one."""
    counts = {name: sum(getattr(each, name) for each in sums) for name in MEASURES}
    costs = [each.cost for each in sums if each.cost is not None]
    return UsageSum(("total", *[""] * (columns - 1)), cost=sum(costs) if costs else None, **counts)


def _estimates(report: UsageReport) -> str:
    """Return the share of the requests with estimated tokens, in all and by method."""
    shares = [f"{method} {count / report.requests:.2%}" for method, count in report.estimated_by.items()]
    return f"~ tokens of {sum(report.estimated_by.values()) / report.requests:.2%} of the requests are estimated: {', '.join(shares)}"


def _numbers(each: UsageSum, decimals: int | None) -> list[str]:
    """Return the columns of a line, with the cost if its ``decimals`` are given. A value that may be an estimate has a mark."""
    mark = "~" if each.estimated else ""
    shown = [f"{mark if name == 'completion_tokens' else ''}{getattr(each, name):,}" for name in _SHOWN]
    if decimals is not None:
        shown.append("-" if each.cost is None else f"{mark}{decimal_of(each.cost):,.{decimals}f}")
    return shown


def cost_decimals(costs: Iterable[int]) -> int:
    """Return the number of decimals that shows all these costs of a column exactly: at least 2."""
    return max([_MIN_DECIMALS, *(len(decimal_text(cost).partition(".")[2]) for cost in costs)])


def _tokens(each: UsageSum) -> int:
    return each.prompt_tokens + each.completion_tokens


FORMATS: Mapping[str, Callable[[UsageReport, Console], None]] = {"table": as_table, "csv": as_csv, "json": as_json}
"""The output formats of usage."""
