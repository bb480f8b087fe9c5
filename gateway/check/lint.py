"""Notes on a valid configuration: for example an admin port without a token, expired keys, or costs without a limit. Pure.

The rule: a note never makes a configuration invalid. Invalid parts are reported as problems elsewhere, and are ignored here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from gateway.config import Key, Note
from gateway.config.models import AdminToken, matches
from gateway.config.quantities import parse_duration
from gateway.config.references import ConfigValue, Draft, all_names, costs_in, open_admin_host, own_names, texts
from gateway.config.secret import OF_LEDGER
from gateway.config.values import EVENTS_POLICY, kv_events_installed
from gateway.key_management.key_list import state
from gateway.limits.windows import SLICES
from gateway.snapshot.snapshot import CALENDAR, DEFAULT_CLASS
from gateway.system.certificate_dates import validity

OPEN_ADMIN_PORT = "other machines can read /status, /keys and /usage on the admin port without a token: set server.admin.token"
"""Also logged when the gateway starts."""
_NAMED = 5
_LONGEST: Mapping[object, int] = {"day": 1, "week": 7, "month": 31}  # days
_COUNTED_SHARE = 1 + 1 / SLICES  # of a rolling window: it counts one slice more
_DAY_SECONDS = 86400
S = TypeVar("S", Key, AdminToken)
Scope = Sequence[str] | None
"""Patterns of models. None: all models."""


class _Model(NamedTuple):
    id: str
    names: Sequence[str]


def notes(draft: Draft, now: datetime) -> Iterator[Note]:
    """Yield all notes. ``now`` is an aware datetime."""
    yield from _open_admin_port(draft)
    yield from _ended(draft, now)
    yield from _ended_tokens(draft, now)
    yield from _certificate(draft, now)
    yield from _unbounded(draft)
    yield from _not_restored(draft)
    yield from _unrecorded_users(draft)
    yield from _without_events(draft)
    yield from _store_for_one_gateway(draft)
    yield from _unused_self_service(draft)
    yield from _unused_reservations(draft)


def note(value: ConfigValue, message: str) -> Note:
    """Return a note on a value of the configuration."""
    problem = value.problem(message)
    return Note(problem.file, problem.line, problem.path, problem.message)


def _open_admin_port(draft: Draft) -> Iterator[Note]:
    if (host := open_admin_host(draft)) is not None:
        yield note(host, OPEN_ADMIN_PORT)


def _ended(draft: Draft, now: datetime) -> Iterator[Note]:
    for entry in draft.keys:
        key = _valid(Key, entry)
        if key is not None and state(key, now) == "expired":
            field = entry.get("hash") if key.expires is None or key.expires > now else entry.get("expires")
            yield note(field, "has expired: all keys of this entry are refused")


def _ended_tokens(draft: Draft, now: datetime) -> Iterator[Note]:
    for token in draft.top.get("server", "admin").each("tokens"):
        valid = _valid(AdminToken, token)
        if valid is not None and valid.expires is not None and valid.expires <= now:
            yield note(token.get("expires"), "has expired: this admin token is refused")


def _certificate(draft: Draft, now: datetime) -> Iterator[Note]:
    """Report certificates that clients reject, or will reject soon."""
    server = draft.top.get("server")
    for cert in (server.get("tls", "cert"), server.get("admin", "tls", "cert")):
        try:
            found = validity(Path(draft.main.file).parent.joinpath(cert.value).read_bytes()) if isinstance(cert.value, str) else None
        except OSError:
            continue
        reported = found and (found.problem(now.timestamp()) or found.warning(now.timestamp()))
        if reported:
            yield note(cert, reported)


def _unrecorded_users(draft: Draft) -> Iterator[Note]:
    """Report headers of end users that are neither stored, for which there must be a ledger, nor limited."""
    if draft.top.get("ledger").value is None:
        teams = {team.get("id").value for team in draft.top.each("teams") if team.get("limits", "per_user").value is not None}
        for key in draft.keys:
            header, is_limited = key.get("user_header"), key.get("limits", "per_user").value is not None or key.get("team").value in teams
            if header.value is not None and not is_limited:
                yield note(header, "has no effect without `ledger` or `limits.per_user`")


def _without_events(draft: Draft) -> Iterator[Note]:
    """Report a policy that could use the KV cache events of servers, if the packages for them are missing."""
    balance = next((value for value in (model.get("balance") for model in draft.models) if value.value == EVENTS_POLICY), None)
    if balance is not None and not kv_events_installed():
        yield note(balance, "does not use KV cache events without the extra `kv-events` (pip install 'vllm-gateway[kv-events]')")


def _store_for_one_gateway(draft: Draft) -> Iterator[Note]:
    """Report a store of keys in SQLite if there seem to be several gateways, which cannot share it."""
    written = draft.top.get("store").url
    url = draft.top.get("ledger").url if written.value == OF_LEDGER else written
    is_sqlite = isinstance(url.value, str) and url.value.startswith("sqlite:")
    if is_sqlite and draft.top.get("limits_store").value is not None:
        yield note(written, "keys in SQLite are for one gateway, but `limits_store` is for several: they need PostgreSQL")


def _unused_self_service(draft: Draft) -> Iterator[Note]:
    """Report policies for the keys of people if no person can sign in, or if there is no store for their keys."""
    missing = [f"`{name}`" for name in ("sign_in", "store") if draft.top.get(name).value is None]
    for policy in draft.self_service if missing else ():
        if policy.value is not None:
            yield note(policy, f"has no effect without {' and '.join(missing)}")


def _unused_reservations(draft: Draft) -> Iterator[Note]:
    """Report classes that reserve slots or preempt if no class comes after, or if no model has a number of slots."""
    classes = list(draft.top.each("classes"))
    bounded = any(model.get("max_inflight").value is not None for model in draft.models)
    has_default = any(each.get("id").value == DEFAULT_CLASS for each in classes)
    for each, name in product(classes, ("reserved_slots", "preempts")):
        setting = each.get(name)
        if setting.value and not bounded:
            yield note(setting, "has no effect without `max_inflight` of a model")
        elif setting.value and has_default and each is classes[-1]:
            yield note(setting, "has no effect: no class comes after this one")


def _valid(section: type[S], entry: ConfigValue) -> S | None:
    try:
        return section.model_validate(entry.value)
    except ValidationError:
        return None


def _not_restored(draft: Draft) -> Iterator[Note]:
    """Report budgets that a restart resets, because nothing records what was used."""
    if draft.top.get("limits_store").value is not None:
        return
    budgets = [value for holder in (*draft.keys, *draft.top.each("teams")) for value in _budgets(holder.get("limits"))]
    ledger = draft.top.get("ledger")
    if budgets and ledger.value is None:
        more = f", like {len(budgets) - 1} more" if len(budgets) > 1 else ""
        yield note(budgets[0], f"starts from zero at each restart{more}: set ledger or limits_store")
    retention, days = ledger.get("retention"), math.ceil(max(map(_days_of, budgets), default=0))
    if _days(retention.value) < days:
        yield note(retention, f"a restart restores budgets from the rows of their windows: keep rows for {days}d")


def _budgets(limits: ConfigValue) -> Iterator[ConfigValue]:
    for value in (limits, limits.get("per_user"), *limits.each("models")):
        names = (f"{kind}_per_{window}" for kind in ("cost", "tokens") for window in CALENDAR)
        yield from (value.get(name) for name in names if value.get(name).value is not None)
        yield from value.each("budgets")


def _days_of(budget: ConfigValue) -> float:
    """Return the days whose rows a budget counts at most; 0 for an invalid window."""
    window = budget.get("window").value or str(budget.path[-1]).rpartition("_")[2]
    if isinstance(window, str) and window in _LONGEST:
        return _LONGEST[window]
    return _days(window) * _COUNTED_SHARE if _days(window) < math.inf else 0


def _days(retention: object) -> float:
    try:
        return math.inf if retention is None else parse_duration(str(retention)) / _DAY_SECONDS
    except ValueError:
        return math.inf


def _unbounded(draft: Draft) -> Iterator[Note]:
    """Report limits of cost whose holder may use models without a price."""
    served = [model for model in draft.models if model.get("split").value is None]
    free = [_Model(str(model.get("id").value), _names(model, draft)) for model in served if model.get("price").value is None]
    if not free or len(free) == len(served):
        return  # without any price it is a problem, not a note
    for key in draft.keys:
        yield from _of(key, [_scope(key)], free)
    by_claim = any(issuer.get("claims", "team").value is not None for issuer in draft.top.each("jwt"))
    for team in draft.top.each("teams"):
        keys = [key for key in draft.keys if by_claim or key.get("team").value == team.get("id").value]
        yield from _of(team, list(map(_scope, keys)), free)


def _of(holder: ConfigValue, scopes: Iterable[Scope], free: Iterable[_Model]) -> Iterator[Note]:
    limits = holder.get("limits")
    costs = [
        (rows, cost)
        for rows in (limits, limits.get("per_user"), *limits.each("models"))
        if (cost := next(costs_in(rows), None)) is not None
    ]
    if not costs:
        return
    usable = [model for model in free if any(_matches(scope, model) for scope in scopes)]
    for rows, cost in costs:
        globs = rows.get("models").value if rows is not limits else None
        if unbounded := [model.id for model in usable if _matches(globs, model)]:
            more = f" and {len(unbounded) - _NAMED} more" if len(unbounded) > _NAMED else ""
            yield note(cost, f"does not limit models without a price: {', '.join(unbounded[:_NAMED])}{more}")


def _scope(key: ConfigValue) -> Scope:
    listed = key.get("models")
    return None if listed.value is None else texts(listed.items())


def _matches(scope: Scope, model: _Model) -> bool:
    return scope is None or any(matches(pattern, name) for pattern in scope for name in model.names)


def _names(model: ConfigValue, draft: Draft) -> list[str]:
    """Return the names under which the model is requested: its own, its adapters' with the same price, and the names of splits."""
    own = texts(all_names(model))
    divided = ((split, split.get("split").value) for split in draft.models)
    splits = [split for split, targets in divided if isinstance(targets, dict) and not targets.keys().isdisjoint(own)]
    return own + [name for split in splits for name in texts(own_names(split))]
