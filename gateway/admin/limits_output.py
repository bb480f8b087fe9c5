"""Print limits for people and for programs: a table with bars, CSV, JSON."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.admin.status_view import duration

_BAR = 24  # columns
_COLUMNS = ("holder", "models", "limit", "amount", "used", "remaining", "reset_seconds", "soft")
Rows = Sequence[Mapping[str, Any]]


def as_json(rows: Rows, console: Console) -> None:
    """Print the limits as JSON. Decimals keep all of their digits."""
    encoded = msgspec.json.Encoder(decimal_format="number").encode({"limits": rows})
    console.file.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


def as_csv(rows: Rows, console: Console) -> None:
    """Print a line for each limit; unknown values are empty."""
    writer = csv.writer(console.file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([" ".join(row[name] or ()) if name == "models" else row[name] for name in _COLUMNS] for row in rows)


def as_table(rows: Rows, console: Console) -> None:
    """Print a table: a bar shows the used share of each limit."""
    if not rows:
        console.print("no limits")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("holder", "models", "limit"):
        table.add_column(name, overflow="fold")
    for name in ("used", "of", "remaining", "reset"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("used share", no_wrap=True)
    for row in rows:
        share = Bar(float(row["amount"]), 0, float(row["used"]), width=_BAR) if row["used"] is not None else Text("")
        reset = "-" if row["reset_seconds"] is None else duration(float(row["reset_seconds"]))
        mark = f" (raised until {row['raised_until']})" if "raised_until" in row else " (soft)" if row["soft"] else ""
        texts = (row["holder"], " ".join(row["models"] or ()) or "all", f"{row['limit']}{mark}")
        table.add_row(*map(Text, texts), _number(row["used"]), _number(row["amount"]), _number(row["remaining"]), reset, share)
    console.print(table)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


FORMATS: Mapping[str, Callable[[Rows, Console], None]] = {"table": as_table, "csv": as_csv, "json": as_json}
"""The output formats of limits."""
