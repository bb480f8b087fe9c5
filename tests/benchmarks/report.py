"""Make the pages `docs/performance*.md` and their charts from results. Pure, except for `write`. `LAYOUTS` has the columns of each case.

The rule: every number in the pages comes from the results. The words are the files of `pages`, where `{{CASE}}` is the place of a case's
tables and `{{does}}` the place of the work of each proxy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.chart import Bar, bars
from tests.benchmarks.peers import GATEWAY, PROXIES
from tests.benchmarks.results import Row, Section, Spread

TEMPLATES = sorted(Path(__file__).with_name("pages").glob("*.md"))
"""The pages, by the names that they have in docs/."""
_MARK = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class Column:
    """A value as it is shown: multiplied, and with so many digits behind the point. `beside`: the column is also shown, with dashes, where
    results have that value alone, as those of earlier versions do.
    """

    value: str
    title: str
    factor: float = 1.0
    digits: int = 0
    beside: str = ""

    def text(self, spread: Spread | None) -> str:
        """`median (least..most)`, the median alone where there is no more."""
        if spread is None:
            return "-"
        least, most = self._number(spread.least), self._number(spread.most)
        return self.median(spread) if least == most else f"{self.median(spread)} ({least}..{most})"

    def median(self, spread: Spread | None) -> str:
        """The median alone."""
        return "-" if spread is None else self._number(spread.median)

    def _number(self, value: float) -> str:
        return f"{value * self.factor:,.{self.digits}f}"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart: of which value of which variant (None: the last), and what it is called."""

    column: Column
    title: str
    variant: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns and the chart of a case. `ratio`: the value also given as a multiple of the gateway's, or of the first variant's."""

    columns: Sequence[Column]
    ratio: str = "cpu"
    drawing: Drawing | None = None


REQUEST = Column("cpu", "CPU per request, µs", 1e6, 1)
EVENT = Column("cpu", "CPU per event, µs", 1e6, 1)
RATE = Column("rate", "requests/s")
LATENCIES = (
    Column("p50", "p50, ms", 1e3, 2),
    Column("p99", "p99, ms", 1e3, 2),
    Column("p999", "p99.9, ms", 1e3, 2, beside="p99"),
)
DELAYS = tuple(replace(column, title=f"delay {column.title}") for column in LATENCIES)
CALLBACKS = tuple(
    Column(f"callback_{value}", f"callback {title}, ms of CPU", 1e3, 2)
    for value, title in {"p99": "p99", "p999": "p99.9", "most": "maximum"}.items()
)
PAUSES = tuple(
    Column(value, f"pause {title}, ms", 1e3, 2) for value, title in {"p50": "p50", "p99": "p99", "p999": "p99.9", "most": "maximum"}.items()
)
RSS, IDLE = Column("rss", "idle memory, MB", 1e-6, 1), Column("idle", "idle CPU, % of a core", 100, 1)
READY = Column("ready", "ready after, s", 1, 1)
PER_STREAM = Column("rss", "memory per stream, KB", 1e-3, 1)
CLIENTS = Column("load", "CPU of the clients, % of a core", 100)
SERVED = (REQUEST, RATE, *LATENCIES)

LAYOUTS: Mapping[str, Layout] = {
    "json": Layout(SERVED, drawing=Drawing(REQUEST, "A chat completion, 64 connections", "64 connections")),
    "limits_and_ledger": Layout((REQUEST, Column("control", "part of control, µs", 1e6, 1), RATE, *LATENCIES)),
    "limited_streams": Layout((EVENT, *DELAYS, Column("streams", "streams"))),
    "streams": Layout((EVENT, *DELAYS, Column("streams", "streams"), CLIENTS), drawing=Drawing(EVENT, "Streams of 50 events a second")),
    "many": Layout((EVENT, PER_STREAM, *DELAYS, CLIENTS), drawing=Drawing(PER_STREAM, "5,000 open streams")),
    "flood": Layout((EVENT, Column("rate", "events/s"), CLIENTS)),
    "prompts": Layout(SERVED, drawing=Drawing(REQUEST, "A prompt of 100 KB", "100 KB")),
    "ttfb": Layout((*LATENCIES, Column("rate", "concurrent JSON requests/s")), ratio="p50"),
    "servers": Layout((*SERVED, IDLE, RSS)),
    "by_cost": Layout((*SERVED, RSS)),
    "keys": Layout((*SERVED, READY, RSS, IDLE)),
    "models": Layout((*SERVED, READY, RSS, IDLE)),
    "workers": Layout((*SERVED, Column("most", "connections of the busiest worker, %", 100))),
    "pauses": Layout((*CALLBACKS, *PAUSES, Column("busy", "CPU, % of a core", 100)), ratio="callback_most"),
    "rest": Layout(
        (RSS, Column("processes", "processes"), IDLE, REQUEST, RATE, Column("growth", "growth, MB a minute", 1e-6, 2)), ratio="rss"
    ),
}


def write(docs: Path, sections: Mapping[str, Section]) -> None:
    """Write the pages and their charts below `docs`."""
    (docs / "performance").mkdir(parents=True, exist_ok=True)
    for name, section in sections.items():
        if (drawing := chart(section, LAYOUTS[name].drawing)) is not None:
            (docs / "performance" / f"{name}.svg").write_text(drawing)
    for template in TEMPLATES:
        (docs / template.name).write_text(document(template.read_text(), sections))


def document(template: str, sections: Mapping[str, Section]) -> str:
    """Return a template with the tables in their places. Links from the template to docs/ and to the tree lead there from the page too."""
    return _MARK.sub(
        lambda match: _machine(match[1], sections.get(match[1])), template.replace("](../../../docs/", "](").replace("](../../../", "](../")
    )


def _machine(case: str, section: Section | None) -> str:
    if case == "does":
        return "\n".join(f"| {proxy.name} | {proxy.does} |" for proxy in PROXIES)
    if section is None:
        return f"Not measured yet: `make bench CASES={case}`."
    return "\n\n".join(part for part in _parts(section, LAYOUTS[case]) if part)


def _parts(section: Section, layout: Layout) -> Iterator[str]:
    """Chart, tables, what went wrong, and what it was measured on."""
    if chart(section, layout.drawing) is not None:
        yield f"![{layout.drawing.title if layout.drawing else ''}](performance/{section.case}.svg)"
    if len({row.proxy for row in section.rows}) == 1:
        yield table(section.rows, layout, "", first=section.rows[0])
    else:
        for variant in section.variants:
            rows = [row for row in section.rows if row.variant == variant]
            yield f"**{variant}**\n\n{table(rows, layout, 'proxy', first=section.find(GATEWAY.name, variant))}"
    yield "\n".join(_remarks(section))
    yield stamp(section)


def table(rows: Sequence[Row], layout: Layout, by: str, first: Row | None) -> str:
    """A table with a row for each of `rows`, named by `proxy` or by variant. Columns without values are left out; `first` is what
    ratios are taken to.
    """
    columns = [column for column in layout.columns if any(row.spread(column.value) or row.spread(column.beside) for row in rows)]
    ratio = first is not None and first.spread(layout.ratio) is not None and len(rows) > 1
    measure = next(column.title.partition(",")[0] for column in layout.columns if column.value == layout.ratio)
    titles = [by, *(column.title for column in columns), *([f"{measure}, {'gateway' if by else 'first'} = 1"] if ratio else [])]
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)]]
    for row in rows:
        cells = [column.text(row.spread(column.value)) for column in columns]
        if ratio and first:
            cells.append(multiple(row.spread(layout.ratio), first.spread(layout.ratio)))
        lines.append([row.proxy if by else row.variant, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def multiple(value: Spread | None, unit: Spread | None) -> str:
    """Return a median as a multiple of another one."""
    return f"{value.median / unit.median:.2f}" if value and unit and unit.median else "-"


def _remarks(section: Section) -> Iterator[str]:
    for row in section.rows:
        for fault, times in {fault: row.faults.count(fault) for fault in row.faults}.items():
            yield f"- {row.proxy}, {row.variant}: {fault}{f' ({times} times)' if times > 1 else ''}"
        yield from (f"- {row.proxy}, {row.variant}: {note}" for note in row.notes)
    for name, reason in section.absent.items():
        yield f"- {name} is not in the tables: {' '.join(reason.split())}"


def stamp(section: Section) -> str:
    """When, how often, beside what, and on what."""
    others = f"other processes used {section.others:.0%} of the machine"
    proxies = ", ".join(f"{name} {version}" for name, version in section.proxies.items())
    on = f"{section.machine['CPU']}, {section.machine['cores']} cores, {section.machine['kernel']}, Python {section.machine['Python']}"
    return f"<sub>{section.finished[:10]}; {_times(section)} in {section.seconds:.0f} s, {others}; {on}; {proxies}.</sub>"


def _times(section: Section) -> str:
    most = max((len(values) for row in section.rows for values in row.values.values()), default=0)
    return f"{most} round{'s' * (most != 1)}"


def chart(section: Section, drawing: Drawing | None) -> str | None:
    """Return a case's chart; None without one, or with nothing to draw."""
    if drawing is None:
        return None
    variant = drawing.variant or (section.variants or [""])[-1]
    spreads = [(row.proxy, row.spread(drawing.column.value)) for row in section.rows if row.variant == variant]
    drawn = [
        Bar(name, spread, drawing.column.text(Spread(spread.median, spread.median, spread.median)), name == GATEWAY.name)
        for name, spread in spreads
        if spread
    ]
    return bars(drawing.title, f"{drawing.column.title}; the line is the minimum and the maximum", drawn) if drawn else None
