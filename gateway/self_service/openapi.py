"""The routes of self-service, and their description as OpenAPI.

``ROUTES`` lists all routes. The application is made from it, so every route is described.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway import __version__
from gateway.self_service.paths import KEY_OPERATIONS, KEYS, LIMITS, ME, OPENAPI, TEAMS, USAGE

JSON = "application/json"
_KEY, _TEAM = f"{KEYS}/{{id:path}}", f"{TEAMS}/{{team:path}}"
_PAGES = {"limit": "keys or people of a page, 100 by default", "cursor": "`next_cursor` of the page before"}
_OF_USAGE = {
    "by": "any of `key` (default), `model`, `day`, `endpoint` and `code`, separated by commas",
    "since": "a date, a month, a time, `today`, `this-month`, or a duration before now such as `12h`; default: `30d`",
    "until": "the same; excluded; default: now",
    "model": "only this model",
    "key": "only this key",
}
_NO_KEY, _NO_TEAM = "no such key, or it is not yours", "no such team, or you do not own it"
_USED = "sums from the ledger, as in `/v1/usage`"
_LIMITED = "the limits of each key, as in `/v1/limits`"
_NAME = "text for people, up to 100 characters"


@dataclass(frozen=True, slots=True)
class Route:
    """A route. ``result`` describes the response of ``status``, ``refusals`` the errors that only some routes have."""

    method: str
    path: str
    summary: str
    result: str
    status: int = 200
    refusals: Mapping[int, str] = field(default_factory=dict)
    queries: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The path in OpenAPI's form."""
        return re.sub(r":path\}", "}", self.path)


_CHANGED = {400: "an invalid field", 409: "refused; the message says why"}
ROUTES = (
    Route("GET", ME, "The signed-in person.", "the person, with each team, its limits and its policy (`self_service`)"),
    Route("GET", KEYS, "Your keys.", "the keys of a page, without hashes", queries=_PAGES),
    Route(
        "POST", KEYS, "Create a key.", "the key; `secret` is not shown again, and null if the request was a repetition", 201, _CHANGED,
        fields={
            "team": "one of your teams, which must have `self_service`",
            "name": _NAME,
            "models": "models or patterns that the policy allows; default: all that it allows",
            "expires": "date or time within the longest lifetime; default: the longest lifetime",
            "limits": "limits and budgets up to the ceilings; what is left open has the ceiling",
        },
    ),
    Route(
        "POST", f"{_KEY}/{{operation}}",
        "`rotate`: create another secret for a key that you have created; the former one stays valid for `overlap`. `revoke`: refuse a key "
        "that you have created, or of a team that you own.",
        "the key; after `rotate` with its `secret`", 200, {**_CHANGED, 404: _NO_KEY},
        fields={"overlap": "with `rotate`: for example `12h`; 7d by default"},
    ),
    Route("GET", _KEY, "A key that you have created, or of a team that you own.", "the key", refusals={404: _NO_KEY}),
    Route(
        "PATCH", _KEY, "Name a key that you have created.", "the key", 200, {**_CHANGED, 404: _NO_KEY},
        fields={"name": f"{_NAME}, or null"},
    ),
    Route("DELETE", _KEY, "Delete a key that you have created.", "it is deleted", 204, {404: _NO_KEY}),
    Route("GET", USAGE, "The usage of your keys. With a key instead of a session, that of the key.", _USED, queries=_OF_USAGE),
    Route(
        "GET", LIMITS, "The limits of your valid keys. With a key instead of a session, those of the key.", _LIMITED,
        queries={"key": "only this key"},
    ),
    Route("GET", f"{_TEAM}/keys", "The keys of the store in a team that you own.",
          "the keys of a page; `made_by` is the creator of a key", refusals={404: _NO_TEAM}, queries=_PAGES),
    Route("GET", f"{_TEAM}/members", "The people of a team that you own.", "the people of a page, as their last sign-in described them",
          refusals={404: _NO_TEAM}, queries=_PAGES),
    Route("GET", f"{_TEAM}/usage", "The usage of a team that you own.", _USED, refusals={404: _NO_TEAM}, queries=_OF_USAGE),
    Route("GET", f"{_TEAM}/limits", "The limits of a team that you own, which its keys share.", "the limits", refusals={404: _NO_TEAM}),
    Route("GET", OPENAPI, "This description.", "OpenAPI 3.1"),
)  # fmt: skip
_ALWAYS = {
    401: "no person is signed in",
    403: "the request is from another page, or the policy of the team forbids it",
    429: "too many requests of this person",
    503: "the database does not respond",
}


def document() -> dict[str, Any]:
    """Return the description as OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route)
    text = "the cookie of the sign-in, with the prefix `__Host-` if the address is https"
    session = {"session": {"type": "apiKey", "in": "cookie", "name": "vllm-gateway-session", "description": text}}
    info = {"title": "vllm-gateway: self-service", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "security": [{"session": []}], "paths": paths, "components": {"securitySchemes": session}}


def _operation(route: Route) -> dict[str, Any]:
    meanings = sorted({route.status: route.result, **_ALWAYS, **route.refusals}.items())
    responses: dict[str, dict[str, Any]] = {str(status): {"description": meaning} for status, meaning in meanings}
    if route.status != 204:
        responses[str(route.status)]["content"] = {JSON: {}}
    parameters = [_parameter(name, "path", "") for name in re.findall(r"\{(\w+)\}", route.template)]
    parameters += [_parameter(name, "query", text) for name, text in route.queries.items()]
    made = {"summary": route.summary, "parameters": parameters, "responses": responses}
    if route.fields:
        properties = {name: {"description": text} for name, text in route.fields.items()}
        made["requestBody"] = {"content": {JSON: {"schema": {"type": "object", "properties": properties}}}}
    return made


def _parameter(name: str, location: str, text: str) -> dict[str, Any]:
    choices = {"enum": list(KEY_OPERATIONS)} if name == "operation" else {}
    return {"name": name, "in": location, "description": text, "required": location == "path", "schema": {"type": "string", **choices}}
