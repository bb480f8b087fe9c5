"""Plays every trace with every chooser and writes the table into docs/prefix-cache.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.prefix.choosers import CHOOSERS
from tests.benchmarks.prefix.traces import TRACES
from tests.benchmarks.prefix.world import play

PAGE = Path(__file__).resolve().parents[3] / "docs" / "prefix-cache.md"
BEGIN, END = "<!-- begin: made by python -m tests.benchmarks.prefix -->", "<!-- end -->"
SEED = 7
SERVERS = (2, 8, 64)
REQUESTS = 250
"""For each server."""


def table() -> Iterator[str]:
    """The lines of the table: for each trace and number of servers, hit rate, skew and seconds to the first token by each chooser."""
    yield f"| traffic | servers | {' | '.join(CHOOSERS)} |"
    yield "|---|---|" + "---|" * len(CHOOSERS)
    for trace in TRACES.values():
        for servers in SERVERS:
            talks = trace.of(SEED, servers, REQUESTS * servers)
            outcomes = [play(talks, servers, chooser) for chooser in CHOOSERS.values()]
            cells = [f"{each.hits:.0%}, {each.skew:.2f}, {each.first:.1f}" for each in outcomes]
            yield f"| {trace.title} | {servers} | {' | '.join(cells)} |"


def main() -> None:
    """Write the table, and show it."""
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{rest.partition(END)[2]}"]))


if __name__ == "__main__":
    main()
