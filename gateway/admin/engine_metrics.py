"""The vLLM servers' own metrics, for Prometheus: where they are, and each server's as it is asked for.

The rule: only servers that the configuration knows can be named, and nothing that a server says is looked into.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gateway.admin.openapi import METRICS
from upstream.vllm import metrics
from upstream.vllm.health import Target
from upstream.vllm.metrics import MetricsUnavailableError

Handler = Callable[[Request], Awaitable[Response]]
_DEADLINE = 9.0  # seconds: below Prometheus' own ten, so that it is told what is wrong


@dataclass(frozen=True, slots=True)
class Engine:
    """A server that can be asked for its own metrics, and the model it serves."""

    model: str
    target: Target


def handlers(known: Callable[[], Mapping[str, Engine]]) -> dict[str, Handler]:
    """By path, what answers there. ``known``: the servers that run, by name."""

    async def targets(request: Request) -> Response:
        return JSONResponse(groups(request.url.netloc, known()))

    async def server_metrics(request: Request) -> Response:
        found = known().get(request.path_params["server"])
        if found is None:
            return PlainTextResponse("no such server, or it is not up\n", 404)
        try:
            text = await metrics.read(found.target, _DEADLINE)
        except MetricsUnavailableError as error:
            return PlainTextResponse(f"{error}\n", 502)
        return Response(text, headers={"content-type": METRICS, "x-content-type-options": "nosniff"})

    return {"/metrics/targets": targets, "/metrics/servers/{server:path}": server_metrics}


def groups(host: str, engines: Mapping[str, Engine]) -> list[dict[str, Any]]:
    """The servers as Prometheus' HTTP service discovery wants them, to be read here: where the one who asks has asked.

    A path is given as it is, because Prometheus encodes it.
    """
    return [
        {"targets": [host], "labels": {"__metrics_path__": f"/metrics/servers/{name}", "model": engine.model, "server": name}}
        for name, engine in engines.items()
    ]
