"""`make bench-quick`: the gateway beside nginx, Envoy and vllm-router in about two minutes, printed and not kept.

The rule: it measures as the cases of the same names do, only shorter. A missing peer or program is named, and the others are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tests.benchmarks import standin
from tests.benchmarks.measures import crowded, loaded, streaming
from tests.benchmarks.peers import GATEWAY, NGINX, ROUTER, Proxy, Running, Setting, debian
from tests.benchmarks.report import DELAYS, EVENT, LATENCIES, PER_STREAM, REQUEST, Column, multiple
from tests.benchmarks.results import Section
from tests.benchmarks.stage import Case, Scale, Stage, measured, say
from tests.benchmarks.streams import crowd
from tests.benchmarks.wire import chat

PROXIES = (GATEWAY.name, NGINX.name, "envoy", ROUTER.name)
_VARIANT = "quick"
_STREAMS, _MANY_STREAMS = 300, 5000


@dataclass(frozen=True, slots=True)
class Part:
    """A table of the output, the case that fills it, and Debian's programs that it needs."""

    title: str
    columns: Sequence[Column]
    case: Case
    needs: Sequence[str] = ()


async def _json(stage: Stage) -> None:
    with standin.json_servers(stage.path("upstream")) as ports, stage.running(Setting(ports), PROXIES) as alive:
        for proxy in stage.rotation(alive):
            await loaded(stage, proxy, _VARIANT, chat(), 64, 2.0)


async def _streams(stage: Stage) -> None:
    with standin.stream_server(stage.path("upstream"), 50) as port, stage.running(Setting((port,)), PROXIES) as alive:
        for proxy in stage.rotation(alive):
            await streaming(stage, proxy, _VARIANT, stage.scale.streams(_STREAMS), 50, 3.0)


async def _many(stage: Stage) -> None:
    count = stage.scale.streams(_MANY_STREAMS)
    with standin.stream_server(stage.path("upstream"), 2) as port:
        for proxy in stage.rounds(list(stage.proxies(PROXIES)), most=1):
            await stage.alone(proxy, Setting((port,)), partial(_growing, stage, count))


async def _growing(stage: Stage, count: int, proxy: Running) -> None:
    rss_at_rest = proxy.tree.rss()
    async with crowd(proxy.port, chat(stream=True)) as clients:
        await crowded(stage, proxy, clients, _VARIANT, count, 2, 4.0, rss_at_rest)


PARTS = (
    Part("A chat completion of 300 bytes, 64 connections", (REQUEST, *LATENCIES), _json, ("wrk", "nginx")),
    Part(f"{_STREAMS} streams of 50 events a second", (EVENT, *DELAYS), _streams),
    Part(f"{_MANY_STREAMS:,} streams of 2 events a second", (EVENT, PER_STREAM, *DELAYS), _many),
)


async def run(proxies: Sequence[Proxy], scale: Scale) -> None:
    """Measure, and print a table after each part."""
    for part in PARTS:
        if missing := [reason for name in part.needs if (reason := debian(name))]:
            print(f"\n{part.title}: not measured: {', '.join(missing)}", flush=True)
            continue
        say(f"== {part.title}")
        section = await measured(part.title, part.case, proxies, scale)
        print("\n" + "\n".join(lines(section, part.columns)), flush=True)


def lines(section: Section, columns: Sequence[Column]) -> Iterator[str]:
    """The table of a section as text: the median of each proxy, and the gateway's as a multiple of each other proxy's."""
    rows = [row for row in section.rows if row.values]
    cells = [[section.case, *(column.title for column in columns)]]
    cells += [[row.proxy, *(column.median(row.spread(column.value)) for column in columns)] for row in rows]
    gateway = section.find(GATEWAY.name, _VARIANT)
    for row in rows:
        if gateway is not None and row is not gateway:
            ratios = (multiple(gateway.spread(each.value), row.spread(each.value)) for each in columns)
            cells.append([f"gateway : {row.proxy}", *ratios])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        yield "  ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))])
    yield from (f"! {row.proxy}: {fault}" for row in section.rows for fault in row.faults)
    yield from (f"! {name} was not measured: {' '.join(reason.split())}" for name, reason in section.absent.items())
    if section.others > 0.1:
        yield f"! other processes used {section.others:.0%} of the machine: compare the CPU only"
