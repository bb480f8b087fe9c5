"""The admin port's routes in words: as OpenAPI for programs, as a page for people.

``ROUTES`` is the list of all of them; the applications are made from it, so nothing is served that is not described.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway import __version__
from gateway.admin.guard import OPEN, TWICE
from gateway.api.reference import HEADERS
from gateway.api.reference import page as openapi_page
from gateway.fleet.operations import OPERATIONS

__all__ = ["HEADERS", "ROUTES", "Described", "document", "page"]

_MISDIRECTED = "the Host is a name, where the port listens on the machine itself and asks for no token"
_FORBIDDEN = "no token is configured, or a page in a browser asks"
_BEGUN = "`stop` is done; the others have begun, and workers know of it: the model's entry of /status"
TEXT, METRICS, JSON, HTML = "text/plain", "text/plain; version=0.0.4", "application/json", "text/html"


@dataclass(frozen=True, slots=True)
class Described:
    """One route. ``answers``: what each status means; ``kinds``: the media types of its 200; ``acts``: over the admin port it needs
    the token; ``queries``: what may be asked behind a ``?``."""

    path: str
    summary: str
    answers: Mapping[int, str]
    kinds: tuple[str, ...]
    method: str = "GET"
    acts: bool = False
    queries: tuple[str, ...] = ()

    @property
    def meanings(self) -> dict[int, str]:
        """What each status means, those of the port's guard among them."""
        guards = {400: TWICE}
        if self.path not in OPEN:
            guards |= {401: "the token is not shown"} | ({403: _FORBIDDEN} if self.acts else {421: _MISDIRECTED})
        both = {400: f"{self.answers[400]}, or {TWICE}"} if 400 in self.answers else {}
        return dict(sorted({**guards, **self.answers, **both}.items()))

    @property
    def security(self) -> list[dict[str, list[str]]]:
        """As OpenAPI has it: the token where it is set, and to act always."""
        return [] if self.path in OPEN else [{"token": []}] if self.acts else [{}, {"token": []}]

    @property
    def template(self) -> str:
        """The path as OpenAPI has it."""
        return re.sub(r":path\}", "}", self.path)

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.template)


ROUTES = (
    Described("/metrics", "The gateway's metrics, for Prometheus.", {200: "every series of this moment"}, (METRICS,)),
    Described(
        "/metrics/targets",
        "The servers whose metrics can be read here, for Prometheus' HTTP service discovery.",
        {200: "a group for each server, with the labels model and server"},
        (JSON,),
    ),
    Described(
        "/metrics/servers/{server:path}",
        "A vLLM server's own metrics, read as it is asked for. `server` is its name in /status, percent-encoded.",
        {200: "as the server wrote them", 404: "no such server, or it is not up", 502: "the server did not give them"},
        (METRICS,),
    ),
    Described("/livez", "Whether the control process lives.", {200: "it does"}, (TEXT,)),
    Described(
        "/readyz",
        "Whether the gateway accepts requests. `status` is `ready`, `degraded` or `not_ready`; `reasons` says why it is not `ready`.",
        {
            200: "it does; `degraded`: a model has no ready server, or something that the gateway depends on is down",
            503: "not yet, or no longer: it starts or stops",
        },
        (JSON,),
    ),
    Described("/status", "Models, servers and workers.", {200: "the whole picture; a page for who prefers HTML"}, (JSON, HTML)),
    Described(
        "/usage",
        "What the ledger answers to a question; `vllm-gateway usage --help` explains its words.",
        {200: "the rows", 400: "no such question", 404: "no ledger is configured", 503: "the ledger's database does not respond"},
        (JSON,),
        queries=("by", "since", "until", "key", "team", "model"),
    ),
    Described(
        "/keys",
        "Whose keys there are: entries with their models, limits and ends, and from the ledger when each was used last. Never a hash.",
        {200: "the entries; `last_use_unknown` says why no last use is known, if so"},
        (JSON,),
    ),
    Described("/openapi.json", "This description.", {200: "OpenAPI 3.1"}, (JSON,)),
    Described("/docs", "This description as a page.", {200: "a page"}, (HTML,)),
    Described(
        "/reload",
        "Read the configuration again.",
        {200: "what became of it", 409: "it is not read; the text says why"},
        (JSON,),
        method="POST",
        acts=True,
    ),
    Described(
        "/drain",
        "Stop the gateway as SIGTERM does: it takes no more requests, lets those under way finish for `server.drain`, and ends.",
        {202: "it has begun", 409: "it is stopping already"},
        (JSON,),
        method="POST",
        acts=True,
    ),
    Described(
        "/models/{id:path}/{operation}",
        "Do something to a model's servers.",
        {200: _BEGUN, 404: "no such model or operation", 409: "it is not done; the text says why"},
        (JSON,),
        method="POST",
        acts=True,
    ),
)

_CHOICES = {"operation": list(OPERATIONS)}


def document() -> dict[str, Any]:
    """The description as OpenAPI 3.1."""
    paths = {route.template: {route.method.lower(): _operation(route)} for route in ROUTES}
    info = {"title": "vllm-gateway: admin API", "version": __version__}
    words = "server.admin.token; without one nothing is asked for, and nothing is done over the port. The admin socket needs none."
    token = {"token": {"type": "http", "scheme": "bearer", "description": words}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"securitySchemes": token}}


def _operation(route: Described) -> dict[str, Any]:
    answers: dict[str, dict[str, Any]] = {str(status): {"description": meaning} for status, meaning in route.meanings.items()}
    answers[min(answers)]["content"] = {kind: {} for kind in route.kinds}
    parameters = [_parameter(name, "path") for name in route.parameters] + [_parameter(name, "query") for name in route.queries]
    told = {"summary": route.summary, "responses": answers, "parameters": parameters}
    return told | ({"security": route.security} if route.security else {})


def _parameter(name: str, place: str) -> dict[str, Any]:
    choices = {"enum": _CHOICES[name]} if name in _CHOICES else {}
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string", **choices}}


def page() -> str:
    """The description as a page that needs nothing else."""
    return openapi_page(document())
