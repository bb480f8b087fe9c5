"""Print the shares of queues for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_flows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table with a row for each key of a queue."""
    if not rows:
        console.print("no request has waited since the gateway started")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("model", "class", "team", "key"):
        table.add_column(name, overflow="fold")
    for name in ("waiting", "dispatched", "refused", "mean wait", "service", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        names = (Text(row[name] or "-") for name in ("model", "class", "team", "key"))
        wait, share = f"{row['wait_seconds']:,.2f} s", f"{row['service_share']:.1%}"
        table.add_row(*names, f"{row['waiting']:,}", f"{row['dispatched']:,}", f"{row['refused']:,}", wait, f"{row['service']:,}", share)
    console.print(table)


def print_open_slots(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a line for each class with reserved slots: the slots that later classes may use now, and why."""
    for row in rows:
        times = " and ".join(f"{name} at {ratio:.0%} of its objective" for name, ratio in sorted(row["objectives"].items(), reverse=True))
        slots = "1 slot" if row["slots"] == 1 else f"{row['slots']:,} slots"
        line = f"{row['model']}: the classes after {row['class']} may use {slots} of each server ({times or 'reserved_slots'})"
        console.print(Text(line), soft_wrap=True)
