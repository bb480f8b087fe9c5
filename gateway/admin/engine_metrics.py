"""The vLLM servers' own metrics, for Prometheus: the list of targets, and each server's metrics on request.

The rule: only configured servers can be requested, and a server's response is passed on without parsing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gateway.admin.audited import Handler
from gateway.admin.openapi import METRICS
from upstream.vllm import metrics_request
from upstream.vllm.health import ProbeTarget
from upstream.vllm.metrics_request import MetricsUnavailableError

_DEADLINE = 9.0  # seconds: less than Prometheus' own ten, so that it receives the error


@dataclass(frozen=True, slots=True)
class Engine:
    """A server whose metrics can be requested, and its model."""

    model: str
    target: ProbeTarget


def handlers(known: Callable[[], Mapping[str, Engine]]) -> dict[str, Handler]:
    """Return the handlers by path. ``known`` returns the running servers by name."""

    async def targets(request: Request) -> Response:
        return JSONResponse(groups(request.url.netloc, known()))

    async def server_metrics(request: Request) -> Response:
        if (found := known().get(request.path_params["server"])) is None:
            return PlainTextResponse("no such server, or it is not up\n", 404)
        try:
            text = await metrics_request.read(found.target, _DEADLINE)
        except MetricsUnavailableError as error:
            return PlainTextResponse(f"{error}\n", 502)
        return Response(text, headers={"content-type": METRICS, "x-content-type-options": "nosniff"})

    return {"/metrics/targets": targets, "/metrics/servers/{server:path}": server_metrics}


def groups(host: str, engines: Mapping[str, Engine]) -> list[dict[str, Any]]:
    """Return the servers in the format of Prometheus' HTTP service discovery. ``host`` is the address that the client has used.

    Paths are not percent-encoded, because Prometheus encodes them.
    """
    return [
        {"targets": [host], "labels": {"__metrics_path__": f"/metrics/servers/{name}", "model": engine.model, "server": name}}
        for name, engine in engines.items()
    ]
