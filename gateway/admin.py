"""The admin port: /metrics, /livez, /readyz and /status, served by control.

The rule: nothing here waits for a relay or a server; every answer is made from what control has at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.metrics import PREFIX, Family, Series, by_family


class Overview(Protocol):
    """What control shows."""

    def series(self) -> Mapping[Series, Sequence[float]]:
        """Every series of this moment: the relays' boards added up, and control's own."""

    def not_ready(self) -> str | None:
        """Why no traffic should come yet; None when it may."""

    def status(self) -> dict[str, Any]:
        """The whole picture, as JSON."""


class _Families(Collector):
    """Presents the families to prometheus_client, which writes the text."""

    def __init__(self, series: Callable[[], Mapping[Series, Sequence[float]]]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        for name, family, rows in by_family(self._series()):
            yield _metric(name, family, rows)


def _metric(name: str, family: Family, rows: Iterable[tuple[tuple[str, ...], Sequence[float]]]) -> Metric:
    full = PREFIX + name
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(full, family.help, labels=family.labels)
        for labels, values in rows:
            histogram.add_metric(labels, _cumulative(family.buckets, values), sum_value=values[-1])
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(full, family.help, labels=family.labels)
    for labels, values in rows:
        metric.add_metric(labels, values[0])
    return metric


def _cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' buckets hold everything up to their bound."""
    total, buckets = 0.0, []
    for bound, count in zip(bounds, counts, strict=False):
        total += count
        buckets.append((str(floatToGoString(bound)), total))  # type: ignore[no-untyped-call]
    return buckets


def registry(overview: Overview) -> CollectorRegistry:
    """The gateway's metrics, and those of the control process itself."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_Families(overview.series))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=made)
    return made


def application(overview: Overview) -> Starlette:
    """The ASGI application of the admin port."""
    metrics_registry = registry(overview)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics_registry), headers={"content-type": content_type})

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = overview.not_ready()
        return PlainTextResponse("ok\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    async def status(_: Request) -> Response:
        return JSONResponse(overview.status())

    return Starlette(routes=[Route("/metrics", metrics), Route("/livez", livez), Route("/readyz", readyz), Route("/status", status)])
