"""Usage for people and for programs: a table with bars, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.ledger.queries import Answer, Sum

_BAR = 24  # columns
_MEASURES = ("requests", "incomplete", "estimated", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "cost")


def as_json(answer: Answer, console: Console) -> None:
    console.file.write(json.dumps(answer.document(), indent=2) + "\n")


def as_csv(answer: Answer, console: Console) -> None:
    """A line for each sum; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*answer.question.by, *_MEASURES])
    writer.writerows([*each.group, *(getattr(each, name) for name in _MEASURES)] for each in answer.sums)
    console.file.write(text.getvalue())


def as_table(answer: Answer, console: Console) -> None:
    """For a terminal: a bar shows each line's share of the largest one's tokens. The cost is there when any model has a price."""
    question = answer.question
    console.print(f"usage from {question.since:%Y-%m-%d %H:%M} to {question.until:%Y-%m-%d %H:%M} UTC", style="dim")
    if not answer.sums:
        console.print("nothing")
        return
    priced = any(each.cost is not None for each in answer.sums)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in question.by:
        table.add_column(name, overflow="fold")
    for name in ("requests", "incomplete", "prompt", "cached", "completion", "reasoning", *(("cost",) if priced else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    largest = max(map(_tokens, answer.sums)) or 1
    for each in answer.sums:
        table.add_row(*(Text(part or "-") for part in each.group), *_numbers(each, priced), Bar(largest, 0, _tokens(each), width=_BAR))
    console.print(table)
    if any(each.estimated for each in answer.sums):
        console.print("~ some of the completion tokens are estimated: those of streams that broke off", style="dim")


def _numbers(each: Sum, priced: bool) -> list[str]:
    mark = "~" if each.estimated else ""
    shown = [f"{each.requests:,}", f"{each.incomplete:,}", f"{each.prompt_tokens:,}", f"{each.cached_tokens:,}"]
    shown += [f"{mark}{each.completion_tokens:,}", f"{each.reasoning_tokens:,}"]
    return [*shown, *(["-" if each.cost is None else f"{mark}{each.cost:,.4f}"] if priced else [])]


def _tokens(each: Sum) -> int:
    return each.prompt_tokens + each.completion_tokens


FORMATS: Mapping[str, Callable[[Answer, Console], None]] = {"table": as_table, "csv": as_csv, "json": as_json}
"""How usage may be printed."""
