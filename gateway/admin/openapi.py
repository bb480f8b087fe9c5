"""The description of the admin port's routes: as OpenAPI, and as a web page.

``ROUTES`` lists all routes. The application is made from it, so every route is described.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from gateway import __version__
from gateway.access.actor import Role
from gateway.access.permissions import OPEN, PERMISSIONS, Permission
from gateway.admin import (
    audit_routes,
    configuration_routes,
    key_routes,
    month_routes,
    notice_routes,
    overview_routes,
    people_routes,
    raise_routes,
    sign_in_links,
)
from gateway.admin.guard import READING, TWICE
from gateway.config import Key, Team
from gateway.fleet.operations import OPERATIONS, SERVER_OPERATIONS
from gateway.store.decisions import ATTRIBUTES, SETTABLE, TEAM_SETTINGS
from gateway.usage.dimensions import CHOICES

_MISDIRECTED = "the Host is a name, although the port listens only on this machine and requires no token"
_FORBIDDEN = "no token is configured, the request is from a web page, or the client's role does not permit it"
_ROLE = "the client's role does not permit it"
_BEGUN = "`stop` is complete, the other operations are in progress and known to the workers; the model's entry of /status"
_NO_LEDGER_DATABASE = "the ledger's database does not respond"
_NO_NOTICES = "no notices are configured, or none of this name"
TEXT, METRICS, JSON, HTML = "text/plain", "text/plain; version=0.0.4", "application/json", "text/html"


@dataclass(frozen=True, slots=True)
class Described:
    """A route.

    ``responses`` describes each status. ``kinds`` are the media types of its successful response. ``queries`` are its query parameters,
    and ``headers`` its request headers. ``fields`` are those of its JSON body.
    """

    path: str
    summary: str
    responses: Mapping[int, str]
    kinds: tuple[str, ...] = (JSON,)
    method: str = "GET"
    queries: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def permission(self) -> Permission:
        """The permission that it requires."""
        return PERMISSIONS[self.method, self.path]

    @property
    def is_operation(self) -> bool:
        """Whether it changes something: the admin port always requires a token."""
        return self.method not in READING

    @property
    def meanings(self) -> dict[int, str]:
        """The description of each status, including those of the port's guard."""
        access = {403: _FORBIDDEN} if self.is_operation else {403: _ROLE, 421: _MISDIRECTED}
        guards = {} if self.permission == OPEN else {401: "the token is missing or invalid", **access}
        invalid = f"{self.responses[400]}, or {TWICE}" if 400 in self.responses else TWICE
        return dict(sorted({**guards, **self.responses, 400: invalid}.items()))

    @property
    def security(self) -> list[dict[str, list[str]]]:
        """The security requirement in OpenAPI's form, with the role. Without a token configured, a client is a viewer."""
        if self.permission.role is None:
            return []
        token = {"token": [self.permission.role.value, *(["owner"] if self.permission.owner else [])]}
        return [token] if self.is_operation or self.permission.role is not Role.VIEWER else [{}, token]

    @property
    def template(self) -> str:
        """The path in OpenAPI's form."""
        return re.sub(r":path\}", "}", self.path)


ROUTES_OF_GATEWAY = (
    Described("/", "Redirects to the console.", {307: "the location of the console"}, ()),
    Described(
        "/console", "The first page of the console. A page contains no data: its script uses these routes.", {200: "a page"}, (HTML,)
    ),
    Described("/console/{page}", "Another page of the console.", {200: "a page", 404: "no such page"}, (HTML,)),
    Described("/console/docs/{document:path}", "A document of this version.", {200: "a page", 404: "no such document"}, (HTML,)),
    Described(
        "/admin/v1/me",
        "The client as the gateway has identified it: `kind`, `name`, its `role` on the gateway, and the `teams` that it owns.",
        {200: "the client"},
    ),
    Described(
        overview_routes.OVERVIEW,
        "The state of the gateway, the alerts that fire, and the last hour: `points` are rows of `columns`, every `step` seconds.",
        {200: "the overview"},
    ),
    Described(
        overview_routes.EVENTS,
        "The same state every few seconds as server-sent events, each with the newest `point`, until the client may no longer read it.",
        {200: "the events", 503: "too many clients read them"},
        ("text/event-stream",),
    ),
    Described(
        overview_routes.CHANGES,
        "The changes of the last day from the audit log, the newest first, or why they are `unknown`.",
        {200: "the changes"},
    ),
    Described(
        configuration_routes.CONFIGURATION,
        "The configuration in use, and what a reload of its files would change and restart. Nothing is applied. `values` have no secrets, "
        "and need the role operator.",
        {200: "the configuration"},
    ),
    Described("/metrics", "The gateway's metrics, for Prometheus.", {200: "all present series"}, (METRICS,)),
    Described(
        "/metrics/targets",
        "The servers whose metrics can be scraped here, for Prometheus' HTTP service discovery.",
        {200: "a group for each server, with the labels model and server"},
    ),
    Described(
        "/metrics/servers/{server:path}",
        "A vLLM server's own metrics. `server` is its name in /status, percent-encoded.",
        {200: "the server's response", 404: "no such server, or it is not up", 502: "the server did not respond with metrics"},
        (METRICS,),
    ),
    Described("/livez", "Liveness of the control process.", {200: "it is alive"}, (TEXT,)),
    Described(
        "/readyz",
        "Whether the gateway accepts requests. `status` is `ready`, `degraded` or `not_ready`; `reasons` says why it is not `ready`.",
        {
            200: "it does; `degraded`: a model has no ready server, a server does not list its model, or a dependency is down",
            503: "it does not: it is starting or stopping",
        },
    ),
    Described("/status", "Models, servers and workers.", {200: "the status", 303: "the location of the console, for browsers"}),
    Described(
        "/admin/v1/models",
        "The status in words, as `vllm-gateway status` prints it: models and servers with their states, causes of failures, hints, the "
        "last lines of their logs, and what the workers know when they choose a server. For programs, `/status` has the numbers.",
        {200: "the status"},
    ),
    Described(
        "/usage",
        f"Usage from the ledger. `by` is a list with commas of {', '.join(CHOICES)}. `vllm-gateway usage --help` explains the parameters. "
        "`truncated`: only the groups with the most tokens are listed.",
        {200: "the rows", 400: "invalid query", 404: "no ledger is configured", 503: "the ledger's database does not respond"},
        queries=("by", "since", "until", "key", "team", "model", "reconcile"),
    ),
    Described(
        month_routes.REQUESTS,
        "Single requests, the newest first, in pages of `limit` (100). `next_cursor` is the `cursor` of the next page. `status` is a "
        "status, a class such as `5xx`, `errors` (5xx, and responses that were cut off), `rejected` (4xx without 499), or `failed` (both, "
        "and 499). `since` is 7d by default. With `id`, only this request. The last requests without a "
        "valid key are among them. `vllm-gateway requests` prints them.",
        {200: "the requests", 400: "invalid query", 404: "no ledger is configured", 503: "the ledger's database does not respond"},
        queries=month_routes.PARAMETERS,
    ),
    Described(
        f"{month_routes.REQUESTS}/{{id}}",
        "One request, with what happened to it in the words of `vllm-gateway requests ID`. `records`: whether bodies of requests are "
        "recorded.",
        {200: "the request", 400: "invalid ID", 404: "no such request, or no ledger is configured", 503: _NO_LEDGER_DATABASE},
    ),
    Described(
        f"{month_routes.REQUESTS}/{{id}}/record",
        "The record of a request with its decrypted bodies, at most 8 MiB. Each use is recorded in the audit log.",
        {200: "the record", 404: "no such record", 503: "the record or the audit log cannot be used"},
    ),
    Described(
        month_routes.MONTHS,
        "The closed months, each with the time at which it was closed and the hash of its report.",
        {200: "the months", 404: "no ledger is configured", 503: "the ledger's database does not respond"},
    ),
    Described(
        month_routes.MONTH,
        "The frozen report of a closed month such as `2026-10`, with the corrections that arrived later. `hash` is the SHA-256 of its "
        "`lines`, each with a newline.",
        {200: "the report", 404: "the month is not closed, or no ledger is configured", 409: "not a month", 503: _NO_LEDGER_DATABASE},
    ),
    Described(
        month_routes.CLOSE,
        "Close a month that has ended. A closed month stays as it is.",
        {200: "the report", 404: "no ledger is configured", 409: "the month has not ended", 503: _NO_LEDGER_DATABASE},
        method="POST",
    ),
    Described(
        "/limits",
        "The limits of keys and teams: what is used, what remains, and the seconds until all of it is available. `vllm-gateway limits` "
        "prints them.",
        {
            200: "the limits: all of them, those that a `key` or a `team` is subject to, or the `closest` (a number of "
            "them) by the share that is used, requests per minute and concurrency included",
            400: "there is no such key or team, or an invalid number",
        },
        queries=("key", "team", "closest"),
    ),
    Described(
        "/keys",
        "Keys with their models, limits, expiry and last use. Without hashes.",
        {200: "the keys; `last_use_unknown` explains why the last use is unknown"},
    ),
    Described(
        "/queue",
        "The classes, teams and keys that have waited for a model: waiting, dispatched and refused requests, their mean wait, and their "
        "service: weighted tokens, in which a queue is fair. For each class with reserved slots, the slots of each server that later "
        "classes may use. `vllm-gateway queue` prints them.",
        {200: "the flows: all of them, or those of a `model`"},
        queries=("model",),
    ),
    Described("/teams", "The teams of the configuration with their limits, policy and number of keys.", {200: "the teams"}),
    Described("/openapi.json", "This description.", {200: "OpenAPI 3.1"}),
    Described("/docs", "This description as a page.", {200: "a page"}, (HTML,)),
    Described(
        sign_in_links.PATH,
        "Create a link that signs in the person `user` once, on one of the ports. `team` and `owned_team` may be repeated.",
        {
            201: "the URLs of the link, which are not shown again, and the seconds within which the link can be used",
            400: "an invalid parameter",
            404: "sign_in is not configured",
            503: "the database does not respond",
        },
        method="POST",
        queries=sign_in_links.QUERIES,
    ),
    Described(
        audit_routes.AUDIT,
        "The entries of the audit log, the newest first, in pages of `limit` (100). `action`, `actor` and `target` are patterns with `*`, "
        "`since` is a date or a time. A page can have fewer entries than `limit`; `next_cursor` is the `cursor` of the next page. The "
        "entries are not verified: `vllm-gateway audit verify` does that.",
        {
            200: "the entries",
            400: "an invalid parameter",
            404: "no audit log is configured",
            503: "the log cannot be read, or its database does not respond",
        },
        queries=audit_routes.QUERIES,
    ),
    Described(
        audit_routes.VERIFICATION,
        "Verify the chains of the audit log, as `vllm-gateway audit verify` does with the present secret, for 30 seconds at most. `broken` "
        "names the first broken entry and explains what is wrong; null: nothing is.",
        {
            200: "the result",
            404: "no audit log is configured",
            503: "the log is too long or is being verified already, it cannot be read, or its database does not respond",
        },
    ),
    Described(
        people_routes.PEOPLE,
        "The people who have signed in, by issuer and subject, in pages of `limit` (100), or those with a `subject`. `sessions` is the "
        "number of valid sessions. `next_cursor` is the `cursor` of the next page.",
        {
            200: "the people as their last sign-in described them",
            400: "an invalid parameter",
            404: "sign_in is not configured",
            503: "the database does not respond",
        },
        queries=people_routes.QUERIES,
    ),
    Described(
        people_routes.SESSIONS,
        "End all sessions of the person with this `id`, on both ports and on all gateways.",
        {
            200: "the number of the sessions; the workers of this gateway refuse them",
            404: "no such person, or sign_in is not configured",
            503: "the database does not respond",
        },
        method="DELETE",
    ),
    Described(
        notice_routes.NOTICES,
        "The last notices, the newest first, with the state of their delivery: `waiting`, `sent`, or `failed`, which is not tried again.",
        {200: "up to `limit` (100) notices", 400: "an invalid limit", 404: _NO_NOTICES, 503: "their database does not respond"},
        queries=("limit",),
    ),
    Described(
        notice_routes.TEST,
        "Send a test notice to the receiver of the notices `name`, or to all receivers.",
        {200: "what came of it for each receiver: whether it accepted the notice, and the start of its reply", 404: _NO_NOTICES},
        method="POST",
        queries=("name",),
    ),
    Described("/reload", "Read the configuration again.", {200: "the result", 409: "refused; the text explains why"}, method="POST"),
    Described(
        "/drain",
        "Stop the gateway as SIGTERM does: it accepts no more requests, gives open requests `server.drain` to finish, and stops.",
        {202: "started", 409: "the gateway is already stopping"},
        method="POST",
    ),
    Described(
        "/models/{id:path}/{operation}",
        "Perform an operation on a model.",
        {200: _BEGUN, 404: "no such model or operation", 409: "refused; the text explains why"},
        method="POST",
    ),
    Described(
        "/servers/{server:path}/{server_operation}",
        "Take a server out of rotation, or return it. `server` is its name in /status, percent-encoded.",
        {200: "complete and known to the workers; the entry of its model in /status", 404: "no such server or operation"},
        method="POST",
    ),
)

_KEYS, _TEAMS = key_routes.KEYS, key_routes.TEAMS
_KEY, _TEAM = f"{_KEYS}/{{id:path}}", f"{_TEAMS}/{{id:path}}"
_NO_ENTRY = "no such key or team, or no store is configured"
_REFUSED = "refused; the text explains why"
_NO_DATABASE = "the store's database does not respond; try again"
_INVALID = "an invalid field or parameter"
_READ = {404: "no store is configured", 503: _NO_DATABASE}
_WRITTEN = {400: _INVALID, 404: _NO_ENTRY, 409: _REFUSED, 413: "the body is too large", 503: _NO_DATABASE}
_VERSIONED = _WRITTEN | {412: "the entry was changed in the meantime", 428: "`If-Match` is missing"}
_REPEATED = {422: "the `Idempotency-Key` was sent with another request"}
_IF_MATCH, _IDEMPOTENCY_KEY = "If-Match", "Idempotency-Key"
_NEW_KEY = "`secret` is the new key, which is not shown again; null if the request was a repetition"


def _settings(section: type[BaseModel], names: Iterable[str]) -> dict[str, str]:
    """Return settings of the configuration with their descriptions."""
    return {name: section.model_fields[ATTRIBUTES.get(name, name)].description or "" for name in names}


_OF_KEY = {"name": "text for people, up to 100 characters"} | _settings(Key, SETTABLE)
_OF_TEAM = _settings(Team, TEAM_SETTINGS)


def _change(path: str, method: str, summary: str, responses: Mapping[int, str], *headers: str, **more: Any) -> Described:
    return Described(path, summary, responses, () if 204 in responses else (JSON,), method=method, headers=headers, **more)


KEY_ROUTES = (
    Described(
        _KEYS,
        "The keys of the store, or of a `team`, by ID, in pages of `limit` (100). The owner of a team sees its keys. "
        "With `search`, those whose ID, name or team contains a text, in pages that may be shorter. "
        "`next_cursor` is the `cursor` of the next page.",
        {200: "the keys, without hashes; `last_use_unknown` explains why the last use is unknown", 400: _INVALID} | _READ,
        (JSON,),
        queries=("cursor", "limit", "search", "team"),
    ),
    _change(
        _KEYS, "POST",
        "Create a key. The owner of a team sends `team`, `name`, `models`, `expires` and `limits`; the ID is chosen by the gateway.",
        {201: f"the key; {_NEW_KEY}"} | _WRITTEN | _REPEATED, _IDEMPOTENCY_KEY,
        fields=_settings(Key, ("id",)) | _OF_KEY,
    ),
    _change(
        f"{_KEYS}/import", "POST",
        "Add the keys of another gateway. The body is its list: a key or `id,key` on each line, or LiteLLM's JSON.",
        {200: "the IDs that were added, the number of known keys, and messages about what was left out"} | _WRITTEN,
    ),
    _change(
        f"{_KEY}/{{key_operation}}", "POST",
        "`rotate`: create another key for the entry; the former ones stay valid for `overlap`. `revoke` its keys, or `restore` them.",
        {200: f"the key; after `rotate`, {_NEW_KEY}"} | _VERSIONED | _REPEATED, _IF_MATCH, _IDEMPOTENCY_KEY,
        fields={"overlap": "with `rotate`: for example `12h`; 7d by default"},
    ),
    Described(_KEY, "A key of the store.", {200: "the key, with its `ETag`"} | _READ | {404: _NO_ENTRY}, (JSON,)),
    _change(
        _KEY, "PATCH", "Change a key, by a JSON merge patch (RFC 7396): null removes a field.", {200: "the key"} | _VERSIONED, _IF_MATCH,
        fields=_OF_KEY,
    ),
    _change(_KEY, "DELETE", "Delete a key.", {204: "it is deleted"} | _VERSIONED, _IF_MATCH),
    Described(
        _TEAMS,
        "The teams of the store, by ID, in pages of `limit` (100), or those whose ID contains `search`. "
        "`next_cursor` is the `cursor` of the next page.",
        {200: "the teams", 400: _INVALID} | _READ,
        (JSON,),
        queries=("cursor", "limit", "search"),
    ),
    _change(
        _TEAMS, "POST", "Create a team.", {201: "the team"} | _WRITTEN | _REPEATED, _IDEMPOTENCY_KEY,
        fields=_settings(Team, ("id",)) | _OF_TEAM,
    ),
    Described(_TEAM, "A team of the store.", {200: "the team, with its `ETag`"} | _READ | {404: _NO_ENTRY}, (JSON,)),
    _change(_TEAM, "PATCH", "Change a team, by a JSON merge patch.", {200: "the team"} | _VERSIONED, _IF_MATCH, fields=_OF_TEAM),
    _change(_TEAM, "DELETE", "Delete a team without keys.", {204: "it is deleted"} | _VERSIONED, _IF_MATCH),
)  # fmt: skip

_RAISES = "the raises in force: the limit, `to` which amount or factor it is raised, `until` when, and by whom"
_OF_RAISE = {
    "limit": "the limit, for example `tokens_per_day`",
    "to": "a factor such as `2x`, or an amount",
    "until": "the end: a time of day in UTC such as `18:00`, a time such as `2027-01-31T18:00:00Z`, or a duration such as `2h`",
}
_NOT_STORED = {503: "they cannot be stored; try again"}


def _raise_routes(path: str, holder: str) -> tuple[Described, ...]:
    unknown = {404: f"no such {holder}, or the limit is not raised"}
    return (
        Described(path, f"The limits of a {holder} that are raised for a time.", {200: _RAISES, 404: f"no such {holder}"}),
        _change(
            path, "POST", f"Raise a limit of a {holder} until a time. A former raise of this limit is replaced.",
            {201: _RAISES, 400: _INVALID, 404: f"no such {holder}"} | _NOT_STORED, fields=_OF_RAISE,
        ),
        _change(
            path, "DELETE", "End the raise of a `limit`, or of all limits.", {200: _RAISES} | unknown | _NOT_STORED, queries=("limit",)
        ),
    )  # fmt: skip


RAISE_ROUTES = (*_raise_routes(raise_routes.KEY_RAISES, "key"), *_raise_routes(raise_routes.TEAM_RAISES, "team"))

ROUTES = (*ROUTES_OF_GATEWAY, *RAISE_ROUTES, *KEY_ROUTES)
"""In this order: the path of a key matches that of its raises too."""

_CHOICES = {"operation": list(OPERATIONS), "server_operation": list(SERVER_OPERATIONS), "key_operation": list(key_routes.OPERATIONS)}


def document() -> dict[str, Any]:
    """Return the description as OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.template, {})[route.method.lower()] = _operation(route)
    info = {"title": "vllm-gateway: admin API", "version": __version__}
    text = (
        "server.admin.token, or one of server.admin.tokens, whose role must be at least the listed one; `owner`: or a person who owns the "
        "team. Without any, reading requires no "
        "token, and operations are refused. The admin socket requires none."
    )
    token = {"token": {"type": "http", "scheme": "bearer", "description": text}}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"securitySchemes": token}}


def _operation(route: Described) -> dict[str, Any]:
    responses: dict[str, dict[str, Any]] = {str(status): {"description": meaning} for status, meaning in route.meanings.items()}
    responses[min(responses)]["content"] = {kind: {} for kind in route.kinds}
    in_path = re.findall(r"\{(\w+)\}", route.template)
    parameters = [_parameter(name, "path") for name in in_path] + [_parameter(name, "query") for name in route.queries]
    parameters += [_parameter(name, "header") for name in route.headers]
    described = {"summary": route.summary, "responses": responses, "parameters": parameters}
    if route.fields:
        properties = {name: {"description": text} for name, text in route.fields.items()}
        described["requestBody"] = {"content": {JSON: {"schema": {"type": "object", "properties": properties}}}}
    return described | ({"security": route.security} if route.security else {})


def _parameter(name: str, location: str) -> dict[str, Any]:
    choices = {"enum": _CHOICES[name]} if name in _CHOICES else {}
    return {"name": name, "in": location, "required": location == "path", "schema": {"type": "string", **choices}}


def page() -> Response:
    """Return the description as a page."""
    from gateway.api.reference import page as openapi_page  # loaded with the first request for it, since it loads the data port's schemas

    return openapi_page(document())
