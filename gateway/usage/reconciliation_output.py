"""Print a reconciliation for people and for programs: a table, CSV, JSON."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.usage.output import as_json
from gateway.usage.reconciliation import KINDS, Classes, ReconciledServer
from gateway.usage.reconciliation_queries import Reconciliation

_CLASSES = tuple(Classes.__dataclass_fields__)
_ALWAYS_SHOWN = ("engine", "ledger", "difference")
_COUNTERS_ONLY = "in_progress", "unsampled"


def as_csv(result: Reconciliation, console: Console) -> None:
    """Print a line for each server and kind of tokens."""
    writer = csv.writer(console.file, lineterminator="\n")
    writer.writerow(["model", "server", "tokens", "since", "until", *_CLASSES, *_COUNTERS_ONLY])
    for each in result.servers:
        times = [datetime.fromtimestamp(time, UTC).isoformat() for time in (each.since, each.until)]
        for kind in KINDS:
            classes: Classes = getattr(each, kind)
            counts = [*(getattr(classes, name) for name in _CLASSES), *(getattr(each, f"{kind}_{name}") for name in _COUNTERS_ONLY)]
            writer.writerow([each.model, each.server, kind, *times, *counts])


def as_table(result: Reconciliation, console: Console) -> None:
    """Print a table with the classes that occur, and what limits its exactness."""
    if not result.servers:
        console.print("nothing: no server's token counters were sampled in this time")
        return
    shown = [name for name in _CLASSES if name in _ALWAYS_SHOWN or any(getattr(getattr(each, kind), name) for each, kind in _lines(result))]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("model", "server"):
        table.add_column(name, overflow="fold")
    for name in ("from", "to", "tokens"):
        table.add_column(name, no_wrap=True)
    for name in shown:
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for each, kind in _lines(result):
        times = (f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}" for time in (each.since, each.until))
        numbers = (f"{getattr(getattr(each, kind), name):,}" for name in shown)
        table.add_row(Text(each.model), Text(each.server), *times, kind, *numbers)
    console.print(table)
    for each in result.servers:
        for note in _notes(each):
            console.print(f"~ {each.server}: {note}", style="dim", markup=False)


def _lines(result: Reconciliation) -> list[tuple[ReconciledServer, str]]:
    return [(each, kind) for each in result.servers for kind in KINDS]


def _notes(each: ReconciledServer) -> list[str]:
    notes = []
    if each.prompt_in_progress or each.completion_in_progress:
        notes.append(
            f"requests with {each.prompt_in_progress:,} prompt and {each.completion_in_progress:,} completion tokens were in flight when "
            "the counters were read; each class may be wrong by them"
        )
    if each.prompt_unsampled or each.completion_unsampled:
        notes.append(
            f"{each.prompt_unsampled:,} prompt and {each.completion_unsampled:,} completion tokens of the ledger are outside of the "
            "sampled time, so no counter confirms them"
        )
    return notes


FORMATS: Mapping[str, Callable[[Reconciliation, Console], None]] = {"table": as_table, "csv": as_csv, "json": as_json}
"""The output formats of a reconciliation."""
