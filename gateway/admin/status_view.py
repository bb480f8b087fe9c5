"""The texts of the console about models and servers, and of the status on a terminal, from the JSON of /status. Pure.

The rule: every text is made here once, so that console and terminal cannot differ. A field that is missing in the JSON is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import counted

STATES = ("ready", "starting", "draining", "sleeping", "stopped", "failed")
_BY_STAGE = {"stopping": "draining", "crashed": "failed", "backing_off": "failed"}
_BY_CONDITION = {"up": "ready", "loading": "starting", "down": "failed"}
_BY_ENDPOINT = {"leaving": "draining", "unready": "starting"}
_BY_STATE = {
    "ready": ("restart", "stop"),
    "starting": ("stop",),
    "draining": ("start",),
    "sleeping": ("wake", "stop"),
    "stopped": ("start",),
    "failed": ("restart", "stop"),
}
"""The operations on a model that the gateway launches."""
_PERCENT = re.compile(r"\b(\d{1,3})(?:\.\d+)?%")
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True, slots=True)
class ServerRow:
    """A server.

    ``state`` is one of STATES. ``load`` is the number of requests in flight, with the limit if there is one. ``restarts`` is empty without
    restarts. ``percent`` is the progress of its start, if known.
    ``reason`` explains why it is down, with the root cause first, and ``hint`` says what to change. ``last_failure`` is the last failure
    of a server that has recovered. ``routing`` are sentences about what the workers know about the server when they choose one.
    """

    name: str
    state: str
    since: str
    load: str
    restarts: str
    reason: str
    hint: str
    last_failure: str
    progress: str
    percent: int | None
    log: str
    lines: tuple[str, ...]
    routing: tuple[str, ...]
    is_cordoned: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The last explained choice of a server. ``candidates``: the name, predicted cost in milliseconds and cached tokens of each."""

    request_id: str
    ago: str
    server: str
    predicted_cached_tokens: int
    candidates: tuple[tuple[str, float, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """A LoRA adapter of a model."""

    id: str
    in_flight: int
    speed: str


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model. ``speed`` is in tokens per second: completion, and prompt. ``operations`` are those that make sense in its state."""

    id: str
    aliases: tuple[str, ...]
    state: str
    since: str
    in_flight: int
    queued: int
    waiting: str
    speed: str
    servers: tuple[ServerRow, ...]
    adapters: tuple[AdapterRow, ...]
    operations: tuple[str, ...]
    choice: Choice | None
    continuations: Mapping[str, int]
    """Streams that lost their server, by whether they were continued."""


@dataclass(frozen=True, slots=True)
class StatusView:
    """The whole status. ``state`` is ``ready``, ``degraded`` or ``not ready``."""

    headline: str
    state: str
    facts: tuple[str, ...]
    warnings: tuple[str, ...]
    models: tuple[ModelRow, ...]
    splits: tuple[str, ...] = ()
    """Sentences about the names that several models serve."""


def status_view(status: Mapping[str, Any]) -> StatusView:
    """Return the view of the JSON of /status."""
    models = tuple(sorted((_model(model, status["time"]) for model in status["models"]), key=lambda model: model.state != "failed"))
    up = sum(any(server.state == "ready" for server in model.servers) for model in models)
    workers = status["workers"]
    facts = (
        f"{up} of {counted(len(models), 'model')} ready",
        f"{sum(model.in_flight + sum(each.in_flight for each in model.adapters) for model in models)} in flight",
        f"{sum(worker['up'] for worker in workers)} of {counted(len(workers), 'worker')} up",
        f"running for {duration(status['time'] - status['started'])}",
        f"version {status['version']}",
    )
    state, headline = _whole(status, sum(model.state == "failed" for model in models))
    return StatusView(headline, state, facts, _warnings(status), models, tuple(map(_split, status.get("splits", ()))))


def _split(split: Mapping[str, Any]) -> str:
    """Return ``chat: m 95%, n 5%, sticky by key``."""
    weights = split["models"]
    shares = ", ".join(f"{model} {100 * weight / sum(weights.values()):.3g}%" for model, weight in weights.items())
    return f"{split['id']}: {shares}" + (f", sticky by {split['sticky']}" if split["sticky"] else "")


def _whole(status: Mapping[str, Any], failed: int) -> tuple[str, str]:
    """Return the state of the gateway, and its headline: failed models first, because waiting for the others does not help them."""
    if not status["ready"]:
        failures = [f"{failed} of {counted(len(status['models']), 'model')} failed"] if failed else []
        return "not ready", "; ".join([*failures, str(status["reason"])])
    reasons = status.get("degraded", ())
    return ("degraded", f"degraded: {', '.join(reasons)}") if reasons else ("ready", "ready")


def _warnings(status: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings: a rejected configuration, settings that need a restart, failed dependencies, rows and budgets at risk."""
    read = status.get("configuration", {})
    problems = read.get("problems", ())
    since = f"the configuration on disk has been invalid for {_since(read.get('when'), status['time'])}"
    failing = [_dependency(one, status["time"]) for one in status.get("dependencies", ()) if one["state"] != "up"]
    ledger = status.get("ledger") or {}
    memory = [f"{counted(ledger['memory_rows'], 'row')} of the ledger in memory only"] if _is_at_risk(status) else []
    budgets = status.get("budgets") or {"restored": True}
    counts = [] if budgets["restored"] else [f"budgets are not restored yet: {budgets['last_error'] or 'the ledger is being read'}"]
    return (*((f"{since}: {problems[0]}", *problems[1:]) if problems else ()), *read.get("needs_restart", ()), *failing, *memory, *counts)


def _dependency(one: Mapping[str, Any], now: float) -> str:
    name = f"{one['name']} ({one['subject']})" if one["subject"] else str(one["name"])
    if one["state"] == "degraded":
        return f"{name} {one['last_error']}"
    return f"{name} is down for {_since(one['since'], now)}: {one['last_error']}"


def _is_at_risk(status: Mapping[str, Any]) -> bool:
    """Return whether neither the disk nor the database accepts ledger rows. A few rows in memory on their way to the disk are normal."""
    down = {one["name"] for one in status.get("dependencies", ()) if one["state"] == "down"}
    return {"ledger_database", "ledger_spool"} <= down


def _model(model: Mapping[str, Any], now: float) -> ModelRow:
    waiting = model.get("waiting_s")
    return ModelRow(
        id=model["id"],
        aliases=tuple(model.get("aliases", ())),
        state=model["state"],
        since=_since(model.get("since"), now),
        in_flight=model["in_flight"],
        queued=model.get("queued", 0),
        waiting=duration(waiting) if waiting else "",
        speed=_speed(model["tokens_per_second"]),
        servers=tuple(_server(server, now, model) for server in model["servers"]),
        adapters=tuple(AdapterRow(one["id"], one["in_flight"], _speed(one["tokens_per_second"])) for one in model.get("loras", ())),
        operations=_BY_STATE[model["state"]] if model.get("launched") else (),
        choice=_choice(model.get("last_choice"), now),
        continuations=model.get("continuations", {}),
    )


def _choice(choice: Mapping[str, Any] | None, now: float) -> Choice | None:
    if choice is None:
        return None
    candidates = tuple((name, each["cost_ms"], each["cached_tokens"]) for name, each in choice["candidates"].items())
    return Choice(choice["request_id"], _since(choice["time"], now), choice["server"], choice["predicted_cached_tokens"], candidates)


def _server(server: Mapping[str, Any], now: float, model: Mapping[str, Any]) -> ServerRow:
    state = _state(server, model["state"])
    lines = tuple(server.get("last_log_lines", ()))
    progress = (server.get("progress") or (lines[-1] if lines else "")) if state == "starting" else ""
    percent = _PERCENT.findall(progress)
    limit, restarts = server.get("max_inflight", model.get("max_inflight")), server.get("restarts", 0)
    return ServerRow(
        name=server["name"],
        state=state,
        since=_since(server.get("since"), now),
        load=str(server["in_flight"]) if limit is None else f"{server['in_flight']} of {limit}",
        restarts=counted(restarts, "restart") if restarts else "",
        reason=str(server.get("reason") or ""),
        hint=str(server.get("hint") or ""),
        last_failure="" if server.get("reason") else _last_failure(server, now),
        progress=progress.strip(),
        percent=min(int(percent[-1]), 100) if percent else None,
        log=server.get("log", ""),
        lines=lines,
        routing=tuple(_routing(server)),
        is_cordoned=bool(server.get("cordoned")),
    )


def _routing(server: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the workers know about a server when they choose one."""
    if ejected := server.get("ejected_by", 0):
        yield f"not chosen by {counted(ejected, 'worker')} after failures"
    if (reason := server.get("max_inflight_reason")) is not None:
        yield f"at most {counted(server['max_inflight'], 'request')} at once: {reason}"
    if (events := server.get("kv_events")) is not None:
        gaps = f", {counted(events['gaps'], 'gap')} in its events" if events["gaps"] else ""
        yield f"{counted(events['blocks'], 'block')} in its prefix cache{gaps}"
        if events["problem"]:
            yield f"KV cache events: {events['problem']}"


def _last_failure(server: Mapping[str, Any], now: float) -> str:
    """Return ``last failure 3 min ago (engine_dead, 1 restart): m#0 ended: …``, or an empty text."""
    if (failure := server.get("last_failure")) is None:
        return ""
    restarts = counted(server.get("restarts", 0), "restart")
    return f"last failure {_since(failure['when'], now)} ago ({failure['cause']}, {restarts}): {failure['line']}"


def _state(server: Mapping[str, Any], model: str) -> str:
    """Return the state of a server.

    A launched server that was ready is ready as long as its health checks succeed. A server out of rotation has the state of its model. If
    the model is ready without it, the server is being replaced, or is not started yet.
    """
    if server.get("cordoned"):
        return "draining" if server["in_flight"] else "stopped"
    stage = server.get("state") or _BY_ENDPOINT.get(server.get("endpoint", ""))
    if stage is None or stage == "ready":
        out_of_rotation = model if model != "ready" else "draining" if stage else "stopped"
        return _BY_CONDITION.get(server["condition"], out_of_rotation)
    return _BY_STAGE.get(stage, str(stage))


def in_a_line(model: Mapping[str, Any], *, with_servers: bool = False) -> str:
    """Return a model of /status with its state, and its servers in another state, or all: ``m: ready (m#0: draining)``."""
    state = model["state"]
    own = [(server["name"], _state(server, state)) for server in model["servers"]]
    others = [f"{name}: {each}" for name, each in own if with_servers or each != state]
    return f"{model['id']}: {state}" + (f" ({', '.join(others)})" if others else "")


def _since(moment: float | None, now: float) -> str:
    return "" if moment is None else duration(now - moment)


def duration(seconds: float) -> str:
    """Return a duration as ``12 s``, ``3 min`` or ``2 h 5 min``, with at most two units."""
    left = max(int(seconds), 0)
    for at, (unit, size) in enumerate(_UNITS):
        if left >= size:
            rest = _UNITS[at + 1 : at + 2]
            more = [f"{left % size // each} {name}" for name, each in rest if left % size // each]
            return " ".join([f"{left // size} {unit}", *more])
    return f"{left} s"


def _speed(tokens: Mapping[str, float]) -> str:
    return f"{_rounded(tokens['completion'])} out, {_rounded(tokens['prompt'])} in" if any(tokens.values()) else "-"


def _rounded(number: float) -> str:
    return f"{number:.0f}" if number >= 10 or number == 0 else f"{number:.1f}"
