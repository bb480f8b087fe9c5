"""Plays every trace with every chooser and writes the tables into docs/prefix-cache-results.md and docs/prefix-cache-more-results.md.

The rule: a row is played by one process, so that its columns have the same requests, and the order of the processes changes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tests.benchmarks.prefix.choosers import CHOOSERS, MakeChooser
from tests.benchmarks.prefix.costs import Blocks, with_events, without_events
from tests.benchmarks.prefix.engines import BatchedEngine, SerialEngine
from tests.benchmarks.prefix.traces import TRACES
from tests.benchmarks.prefix.world import Outcome, play

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = (DOCS / "prefix-cache-results.md", DOCS / "prefix-cache-more-results.md")
BEGIN, END = "<!-- begin: {name}, made by python -m tests.benchmarks.prefix -->", "<!-- end -->"
REQUESTS = 250
"""For each server."""
ENGINES = {"serial": SerialEngine, "batched": BatchedEngine}


@dataclass(frozen=True, slots=True)
class Column:
    """A way to choose. ``event_delay``: as in ``play``. ``engine``: a name of ``ENGINES``."""

    title: str
    chooser: str
    gateways: int = 1
    event_delay: float | None = None
    engine: str = "serial"


@dataclass(frozen=True, slots=True)
class Table:
    """Traces of all numbers of servers and seeds, by all columns."""

    columns: Sequence[Column]
    traces: Sequence[str] = tuple(TRACES)
    servers: Sequence[int] = (2, 8, 64)
    seeds: Sequence[int] = (7, 11)

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """The name of a trace, the number of servers and the seed of each row."""
        return list(product(self.traces, self.servers, self.seeds))


COST, EVENTS = "`cost`", "`cost` with events"
TABLES: Mapping[str, Table] = {
    "one gateway": Table([Column(name, name) for name in (*CHOOSERS, COST)]),
    "several gateways": Table(
        [
            *(Column(f"{gateways} without events", COST, gateways) for gateways in (1, 2, 4)),
            *(Column(f"{gateways} with events", EVENTS, gateways, 0.1) for gateways in (1, 2, 4)),
        ],
        traces=("b2b-2", "agents"),
        servers=(8,),
        seeds=(7,),
    ),
    "batches": Table([Column(name, name, engine="batched") for name in (*CHOOSERS, COST)], servers=(8,), seeds=(7,)),
}


def choosers() -> dict[str, MakeChooser]:
    """Return all choosers by their names. Those with a prefix index share the blocks of prompts."""
    blocks = Blocks()
    return {**CHOOSERS, COST: partial(without_events, blocks=blocks), EVENTS: partial(with_events, blocks=blocks)}


def played(trace: str, servers: int, seed: int, columns: Sequence[Column]) -> list[Outcome]:
    """Play one row."""
    talks = TRACES[trace].of(seed, servers, REQUESTS * servers)
    makers = choosers()
    return [
        play(
            talks,
            servers,
            makers[column.chooser],
            gateways=column.gateways,
            event_delay=column.event_delay,
            engine=ENGINES[column.engine],
        )
        for column in columns
    ]


def line(trace: str, servers: int, seed: int, outcomes: Sequence[Outcome]) -> str:
    """Return a row: hit rate, skew and seconds to the first token in each column, and the mean requests in flight of a server."""
    cells = [f"{each.hits:.0%}, {each.skew:.2f}, {each.first:.2f}" for each in outcomes]
    return f"| {TRACES[trace].title} | {servers} | {seed} | {outcomes[-1].in_flight:.1f} | {' | '.join(cells)} |"


def main() -> None:
    """Write the tables that are named, or all, and show them."""
    chosen = {name: TABLES[name] for name in sys.argv[1:] or TABLES}
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        tasks = [(name, row) for name, table in chosen.items() for row in table.rows]
        tasks.sort(key=lambda task: -task[1][1])  # the long ones first
        results = {(name, row): executor.submit(played, *row, TABLES[name].columns) for name, row in tasks}
        for name, table in chosen.items():
            titles = ["traffic", "servers", "seed", "in flight", *(column.title for column in table.columns)]
            lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
            lines += [line(*row, results[name, row].result()) for row in table.rows]
            print(*lines, sep="\n", flush=True)
            write(name, lines)


def write(name: str, lines: Sequence[str]) -> None:
    """Replace a table in its page. Raises LookupError if no page has a place for it."""
    begin = BEGIN.format(name=name)
    page = next((page for page in PAGES if begin in page.read_text()), None)
    if page is None:
        raise LookupError(f"no page has the line {begin}")
    before, _, rest = page.read_text().partition(begin)
    page.write_text("\n".join([f"{before}{begin}", "", *lines, "", f"{END}{rest.partition(END)[2]}"]))


if __name__ == "__main__":
    main()
