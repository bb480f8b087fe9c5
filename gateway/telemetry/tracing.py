"""Make a span for each traced request, and send it to the collector.

The rules: while a request is served, only ids are generated; a thread makes the span from the ``RequestRecord`` afterwards, and no
request waits for a collector.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from gateway import __version__
from gateway.telemetry.request_record import Continuation, RequestRecord, requested_model
from gateway.telemetry.trace import Trace

if TYPE_CHECKING:  # OpenTelemetry is optional: only the exporting thread imports it
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_MAX_WAITING = 16  # batches that may wait for a slow collector; a batch is what one tick gathered
_MAX_SPANS = 2048  # that one batch may have
_TIMEOUT = 2.0  # seconds
_DEADLINE = 10.0  # seconds for one batch
_log = logging.getLogger("vllm_gateway.tracing")

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""The operation of a route in the semantic conventions; for other routes, the end of the path is used."""


class Spans:
    """Collects the records of traced requests, which a thread exports. The first record starts the thread.

    ``endpoint``: the URL of the collector; ``scheme``: of the data port, http or https.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.scheme = "http"
        self._records: list[RequestRecord] = []
        self._waiting: queue.Queue[tuple[str, list[RequestRecord]] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._exporters: dict[str, SpanExporter] = {}
        self.dropped = 0

    def add(self, record: RequestRecord) -> None:
        """Add a record; the next flush exports it."""
        if len(self._records) < _MAX_SPANS:
            self._records.append(record)
        else:
            self.dropped += 1

    def flush(self) -> None:
        """Hand the collected records to the thread; called a few times a second."""
        if self._records:
            if self._thread is None:
                self._thread = threading.Thread(target=self._export, name="spans", daemon=True)
                self._thread.start()
            with suppress(queue.Full):  # they stay, up to the bound, until the collector continues
                self._waiting.put_nowait((self.endpoint, self._records))
                self._records = []
        if self.dropped:
            _log.warning("%d spans were dropped: the collector is slow or unreachable", self.dropped)
            self.dropped = 0

    def _export(self) -> None:
        """Export batches until stopped. Runs in the thread."""
        resource = None
        while (batch := self._waiting.get()) is not None:
            endpoint, records = batch
            try:
                resource = resource or _resource()
                exporter = self._exporters.get(endpoint) or self._exporters.setdefault(endpoint, _exporter(endpoint))
                exporter.export(list(_encoded(records, resource, self.scheme)))
            except Exception:  # noqa: BLE001  the outer edge: later spans are still exported
                _log.exception("%d spans could not be exported", len(records))

    def close(self, timeout: float = _TIMEOUT) -> None:
        """Export what is left and end the thread; a blocked collector gets this many seconds."""
        self.flush()
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            return  # the thread is a daemon and ends with the process
        self._thread.join(timeout)
        for exporter in self._exporters.values():
            exporter.shutdown()  # no more retries


def _exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=_DEADLINE)


def _resource() -> Resource:
    """Return the service; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    return Resource({"service.name": "vllm-gateway", "service.version": __version__}).merge(OTELResourceDetector().detect())


def _encoded(records: Iterable[RequestRecord], resource: Resource, scheme: str) -> Iterator[ReadableSpan]:
    for record in records:
        try:
            if record.trace is not None:
                yield span(record, record.trace, resource, scheme)
        except Exception:  # noqa: BLE001  the outer edge: a record that cannot be encoded must not cost the others
            _log.exception("a span could not be encoded")


def span(record: RequestRecord, trace: Trace, resource: Resource, scheme: str) -> ReadableSpan:
    """Make a span of the kind SERVER from a finished request."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    trace_id, flags = int(trace.trace_id, 16), TraceFlags(TraceFlags.SAMPLED)
    context = SpanContext(trace_id, int(trace.span_id, 16), is_remote=False, trace_flags=flags)
    parent = None if trace.parent is None else SpanContext(trace_id, int(trace.parent, 16), is_remote=True, trace_flags=flags)
    start = int(record.started * 1e9)
    return ReadableSpan(
        name=f"{operation(record.endpoint)} {record.model}" if record.model else f"POST {record.endpoint}",
        context=context,
        parent=parent,
        resource=resource,
        attributes=attributes(record, scheme),
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR if failed(record) else StatusCode.UNSET),
        events=[_event(each, start) for each in record.continuations],
        start_time=start,
        end_time=start + int(record.duration * 1e9),
        instrumentation_scope=InstrumentationScope("vllm_gateway", __version__),
    )


def _event(each: Continuation, start: int) -> Event:
    """Make an event of a span, at the time at which a server was lost. ``start``: of the span, in nanoseconds."""
    from opentelemetry.sdk.trace import Event

    values = {name: value for name, value in asdict(each).items() if name != "at" and value is not None}
    attributes = {f"vllm_gateway.continuation.{name}": value for name, value in values.items()}
    return Event("vllm_gateway.continuation", attributes, start + int(each.at * 1e9))


def operation(endpoint: str) -> str:
    """Return ``gen_ai.operation.name``."""
    return OPERATIONS.get(endpoint) or endpoint.rpartition("/")[2]


def failed(record: RequestRecord) -> bool:
    """Check whether the server side failed; client errors do not count (semantic conventions for HTTP server spans)."""
    return record.status >= 500 or record.incomplete in ("upstream", "drain")


def attributes(record: RequestRecord, scheme: str) -> dict[str, str | bool | int | float]:
    """Return the attributes of the semantic conventions. The only text of a client is the name of an unknown model."""
    usage = record.usage
    values: dict[str, str | bool | int | float | None] = {
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "url.path": record.endpoint,  # not the path as sent: a mount's prefix may be secret, and a query is the client's text
        "url.scheme": scheme,
        "http.response.status_code": record.status,
        "error.type": record.code,
        "vllm_gateway.param": record.param,
        "vllm_gateway.requested_model": requested_model(record),
        "gen_ai.operation.name": operation(record.endpoint),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.time_to_first_chunk": record.first_token,
        "vllm_gateway.request_id": record.id,
        "vllm_gateway.key": record.key.id if record.key else None,
        "vllm_gateway.server": record.server,
        "vllm_gateway.retries": record.retries,
        "vllm_gateway.queued": record.queued,
        "vllm_gateway.incomplete": record.incomplete,
        "vllm_gateway.estimated_by": record.estimated_by,
        "gen_ai.usage.input_tokens": usage.prompt if usage else None,
        "gen_ai.usage.output_tokens": usage.completion if usage else None,
        "gen_ai.usage.cache_read.input_tokens": usage.cached if usage else None,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning if usage else None,
    }
    return {name: value for name, value in values.items() if value is not None}
