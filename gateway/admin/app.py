"""The application of the admin port and the admin socket: metrics, health, status, usage, keys, operations, and their API reference.

The rules: a response is built from the current state of control and does not wait. Exceptions are a server's own metrics, /usage and /keys,
which wait for the ledger's database in a separate thread, and the logs in /status, which are read in a thread. Each operation is logged
with the client that requested it, and its entry of the audit log is durable before the response. The port's guard or the owner of the
socket identifies the client; here its role is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from gateway.access.actor import Actor
from gateway.admin import (
    audit_routes,
    configuration_routes,
    engine_metrics,
    key_routes,
    month_routes,
    notice_routes,
    openapi,
    overview_routes,
    people_routes,
    raise_routes,
    sign_in_links,
)
from gateway.admin.audited import AuditedHandlers, Handler, RefusedRequest, configured, entry_of, json_response, log_operation
from gateway.admin.audited import error_response as _error
from gateway.admin.engine_metrics import Engine
from gateway.admin.month_routes import NO_LEDGER
from gateway.admin.queue_report import queue_report
from gateway.admin.status_view import status_view
from gateway.api.accept_header import prefers_html
from gateway.audit.entry import Audit, AuditUnavailableError
from gateway.config.problems import did_you_mean
from gateway.console import documents, pages
from gateway.fleet.operations import OPERATIONS, SERVER_OPERATIONS, Operations, RefusedOperation
from gateway.key_management.key_list import LastUse
from gateway.ledger.errors import DatabaseUnavailableError, MonthError
from gateway.recording.reading import NoRecordError, RecordError
from gateway.telemetry.metrics import PREFIX, Family, Series, by_family
from gateway.usage.errors import QueryError

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog
    from gateway.notices.service import Notices
    from gateway.sign_in.service import SignIn
    from gateway.store.service import Store


class Overview(Protocol):
    """The state of the gateway, as the admin port shows it."""

    def series(self) -> Mapping[Series, Sequence[float]]:
        """Return every series: the sums of the workers' counters, and control's own."""

    def not_ready(self) -> str | None:
        """Return why the gateway is not ready for traffic, or None if it is ready."""

    def degraded(self) -> list[str]:
        """Explain why some requests cannot be served as configured."""

    def status(self) -> dict[str, Any]:
        """Return the JSON of /status, without the last log lines of launched servers."""

    async def status_with_logs(self) -> dict[str, Any]:
        """Return the JSON of /status."""

    async def usage(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the ledger's response to a usage query, None without a ledger.

        Raises QueryError, and DatabaseUnavailableError if the database does not respond.
        """

    async def requests(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a page of single requests, None without a ledger. Raises QueryError and DatabaseUnavailableError."""

    async def request(self, identity: str) -> dict[str, Any] | None:
        """Return what happened to a request, empty for an unknown one, None without a ledger. Raises DatabaseUnavailableError."""

    async def record(self, identity: str) -> dict[str, Any] | None:
        """Return the record of a request, None if requests are not recorded. Raises RecordError."""

    def months(self) -> month_routes.Months | None:
        """Return what reads and closes months, None without a ledger."""

    async def limits(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the state of limits, of all keys and teams or of those that a query names. Raises QueryError."""

    async def keys(self) -> dict[str, Any]:
        """Return the keys as /keys shows them."""

    def teams(self) -> dict[str, Any]:
        """Return the teams of the configuration as /teams shows them."""

    def keys_of_teams(self, teams: Iterable[str]) -> Mapping[str, int]:
        """Return the number of keys of each team, in the configuration and in the store."""

    async def last_use(self, keys: Sequence[str]) -> LastUse:
        """Return when keys were last used, or why that is unknown."""

    def engines(self) -> Mapping[str, Engine]:
        """Return the running servers by name."""


class _Families(Collector):
    """Convert the metric families for prometheus_client, which writes the text."""

    def __init__(self, series: Callable[[], Mapping[Series, Sequence[float]]]) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        for name, family, rows in by_family(self._series()):
            yield _metric(name, family, rows)


def _metric(name: str, family: Family, rows: Iterable[tuple[tuple[str, ...], Sequence[float]]]) -> Metric:
    metric = _METRICS[family.kind](PREFIX + name, family.help, labels=family.labels)
    for labels, values in rows:
        if isinstance(metric, HistogramMetricFamily):
            metric.add_metric(labels, _cumulative(family.buckets, values), sum_value=values[-1])
        else:
            metric.add_metric(labels, values[0])
    return metric


_METRICS: Mapping[str, type[HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily]] = {
    "histogram": HistogramMetricFamily,
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


def _cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus requires."""
    return [(str(floatToGoString(bound)), total) for bound, total in zip(bounds, accumulate(counts), strict=False)]  # type: ignore[no-untyped-call]


def registry(overview: Overview) -> CollectorRegistry:
    """Return the registry of the gateway's metrics and those of the control process."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_Families(overview.series))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=made)
    return made


def application(
    overview: Overview,
    operations: Operations,
    audit: Audit,
    *,
    raises: raise_routes.RaiseStorage,
    live: overview_routes.Live,
    files: configuration_routes.Files,
    store: Store | None = None,
    sign_in: SignIn | None = None,
    notices: Notices | None = None,
    audit_log: AuditLog | None = None,
) -> Starlette:
    """Return the ASGI application of the admin port and the admin socket. Requests have a ``requester`` in their state.

    ``store``, ``sign_in``, ``notices``, and ``audit_log``: None if they are not configured.
    """
    audited = AuditedHandlers(audit)
    links = {sign_in_links.PATH: audited.recorded(sign_in_links.handler(sign_in))}
    of_console = overview_routes.handlers(live) | configuration_routes.handlers(files) | notice_routes.handlers(notices, audited)
    handlers = _handlers(overview) | _pages(signs_in=sign_in is not None) | links | of_console
    handlers |= _operation_handlers(overview, operations, audited)
    handlers |= _record_handlers(overview, audited)
    handlers |= audit_routes.handlers(audit_log)
    handlers |= month_routes.handlers(overview.months, audited)
    by_method = key_routes.handlers(store, overview, audited, raises) | people_routes.handlers(sign_in)
    by_method |= raise_routes.handlers(raises, audited)

    def handler(route: openapi.Described) -> Handler:
        if route.path not in by_method:
            return handlers[route.path]
        found = by_method[route.path][route.method]
        return audited.recorded(found) if route.is_operation else found

    routes = [Route(route.path, audited.permitted(handler(route), route.permission), methods=[route.method]) for route in openapi.ROUTES]
    return Starlette(routes=routes, exception_handlers=dict.fromkeys((RefusedRequest, *_ERRORS), _respond_to))


_ERRORS: Mapping[type[Exception], tuple[int, str]] = {
    QueryError: (400, "{}"),
    MonthError: (409, "{}"),
    RefusedOperation: (409, "{}"),
    AuditUnavailableError: (503, "the operation was performed, but the audit log cannot be written: {}"),
    NoRecordError: (404, "{}"),
    RecordError: (503, "{}"),
    DatabaseUnavailableError: (503, "the ledger's database does not respond: {}"),
}
"""The errors that handlers raise, each with the status and the text of its response."""


async def _respond_to(_: Request, error: Exception) -> Response:
    if isinstance(error, RefusedRequest):
        return _error(str(error), error.status)
    status, text = _ERRORS[type(error)]
    return _error(text.format(error), status)


def _handlers(overview: Overview) -> dict[str, Handler]:
    metrics_registry = registry(overview)

    async def metrics(request: Request) -> Response:
        encode, content_type = _encoder(request.headers.get("accept", ""))
        return Response(encode(metrics_registry), headers={"content-type": content_type})

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason, headers = overview.not_ready(), {"cache-control": "no-store"}
        if reason is not None:
            return JSONResponse({"status": "not_ready", "reasons": [reason]}, 503, headers)
        reasons = overview.degraded()
        return JSONResponse({"status": "degraded" if reasons else "ready", "reasons": reasons}, headers=headers)

    async def status(request: Request) -> Response:
        headers = {"cache-control": "no-store", "vary": "accept"}
        if prefers_html(request.headers.get("accept", "")):
            return RedirectResponse("console", 303, headers)
        return JSONResponse(await overview.status_with_logs(), headers=headers)

    async def models(_: Request) -> Response:
        return json_response(status_view(await overview.status_with_logs()))

    async def queue(request: Request) -> Response:
        return json_response(queue_report(overview.series(), request.query_params.get("model")))

    async def teams(_: Request) -> Response:
        return json_response(overview.teams())

    return {
        "/metrics": metrics,
        "/livez": livez,
        "/readyz": readyz,
        "/status": status,
        "/admin/v1/models": models,
        "/limits": _shown(lambda request: overview.limits(dict(request.query_params))),
        "/keys": _shown(lambda _: overview.keys()),
        "/queue": queue,
        "/teams": teams,
        **_ledger_handlers(overview),
        **engine_metrics.handlers(overview.engines),
        **_documents(),
    }


def _shown(read: Callable[[Request], Awaitable[object]]) -> Handler:
    """Return a handler that shows what ``read`` returns. None: no ledger is configured."""

    async def handle(request: Request) -> Response:
        return json_response(configured(await read(request), NO_LEDGER))

    return handle


def _ledger_handlers(overview: Overview) -> dict[str, Handler]:
    async def one_request(request: Request) -> dict[str, Any] | None:
        identity = request.path_params["id"]
        found = await overview.request(identity)
        if found == {}:
            raise RefusedRequest(404, f"there is no request {identity} in the ledger")
        return found

    return {
        "/usage": _shown(lambda request: overview.usage(dict(request.query_params))),
        month_routes.REQUESTS: _shown(lambda request: overview.requests(dict(request.query_params))),
        f"{month_routes.REQUESTS}/{{id}}": _shown(one_request),
    }


def _record_handlers(overview: Overview, audited: AuditedHandlers) -> dict[str, Handler]:
    async def record(request: Request) -> Response:
        identity = request.path_params["id"]
        found = configured(await overview.record(identity), "requests are not recorded; add `record` to the configuration")
        await audited.note(request, "record.view", identity, None, None)
        return json_response(found)

    return {f"{month_routes.REQUESTS}/{{id}}/record": audited.recorded(record)}


def _pages(*, signs_in: bool) -> dict[str, Handler]:
    async def index(_: Request) -> Response:
        return RedirectResponse("console")

    async def page(request: Request) -> Response:
        path = request.url.path
        return pages.page(path, signs_in=signs_in) if path in pages.PAGES else _error("the console has no such page", 404)

    async def document(request: Request) -> Response:
        found = await asyncio.to_thread(documents.page, request.path_params["document"], signs_in=signs_in)
        return found or _error("this version has no such document", 404)

    async def me(request: Request) -> Response:
        actor: Actor = request.state.requester.actor
        return json_response({"kind": actor.kind, "name": actor.name, "role": actor.role, "teams": sorted(actor.teams)})

    return {"/": index, "/console": page, "/console/{page}": page, documents.PREFIX + "{document:path}": document, "/admin/v1/me": me}


def _encoder(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """Return the encoder for an Accept header.

    A version that is not a number counts as unknown, because prometheus_client would fail on it.
    """
    try:
        return choose_encoder(accept)
    except TypeError:
        return choose_encoder("")


def _documents() -> dict[str, Handler]:
    async def document(_: Request) -> Response:
        return JSONResponse(openapi.document())

    async def docs(_: Request) -> Response:
        return openapi.page()

    return {"/openapi.json": document, "/docs": docs}


def _operation_handlers(overview: Overview, operations: Operations, audited: AuditedHandlers) -> dict[str, Handler]:
    async def operate(request: Request) -> Response:
        name, operation = request.path_params["id"], request.path_params["operation"]
        if operation not in OPERATIONS:
            return _error(f"there is no operation {operation}", 404)
        status = overview.status()
        if (model := _model_named(name, status)) is None:
            return _error(_unknown(name, status), 404)

        def state() -> dict[str, Any] | None:
            return next(({"state": each["state"]} for each in overview.status()["models"] if each["id"] == model), None)

        entry = entry_of(f"model.{operation}", request, model, state())
        await audited.perform(request, entry, getattr(operations, operation)(model), state)
        shown = next((each for each in (await overview.status_with_logs())["models"] if each["id"] == model), None)
        return JSONResponse(shown) if shown is not None else _error(f"{model} was removed from the configuration meanwhile", 404)

    async def operate_server(request: Request) -> Response:
        server, operation = request.path_params["server"], request.path_params["server_operation"]
        if operation not in SERVER_OPERATIONS:
            return _error(f"there is no operation {operation}", 404)
        owners = {one["name"]: model["id"] for model in overview.status()["models"] for one in model["servers"]}
        if server not in owners:
            own = [name for name, model in owners.items() if model == server]
            hint = f"; the servers of this model are {', '.join(own)}" if own else did_you_mean(server, list(owners))
            return _error(f"there is no server {server}{hint}", 404)

        def state() -> dict[str, Any]:
            servers = (one for model in overview.status()["models"] for one in model["servers"])
            return {"cordoned": any(one["name"] == server and one.get("cordoned", False) for one in servers)}

        entry = entry_of(f"server.{operation}", request, server, state())
        await audited.perform(request, entry, getattr(operations, operation)(server), state)
        models = (await overview.status_with_logs())["models"]
        return JSONResponse(next(model for model in models if model["id"] == owners[server]))

    async def reload(request: Request) -> Response:
        log_operation("reload", request)
        return JSONResponse((await operations.reload(request.state.requester)).as_json())  # the reloader records it, with the difference

    async def drain(request: Request) -> Response:
        await audited.perform(request, entry_of("gateway.drain", request, "", None), operations.drain(), lambda: None)
        return JSONResponse({"draining": True}, 202)

    return {
        "/reload": audited.recorded(reload),
        "/drain": audited.recorded(drain),
        "/models/{id:path}/{operation}": audited.recorded(operate),
        "/servers/{server:path}/{server_operation}": audited.recorded(operate_server),
    }


def _model_named(name: str, status: Mapping[str, Any]) -> str | None:
    """Return the ID of the model with this ID or alias, or None."""
    return next((each["id"] for each in status["models"] if name in (each["id"], *each["aliases"])), None)


def _unknown(name: str, status: Mapping[str, Any]) -> str:
    """Return why no model has this ID or alias."""
    models = status["models"]
    base = next((each["id"] for each in models for lora in each["loras"] if name in (lora["id"], *lora["aliases"])), None)
    if base is not None:
        return f"{name} is a LoRA adapter on the servers of {base}; use that ID"
    return f"there is no model {name}{did_you_mean(name, [each['id'] for each in models])}"
