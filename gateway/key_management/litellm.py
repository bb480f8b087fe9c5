"""Read LiteLLM's list of keys (``GET /key/list?return_full_object=true``) as entries of this configuration. Pure, from its text.

Its ``token`` is the SHA-256 of the key, as here. The rule: every restriction of a key is imported or reported as left out; no restriction
is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_LIMITS = {"rpm_limit": "requests_per_minute", "tpm_limit": "tokens_per_minute", "max_parallel_requests": "concurrent"}
_BUDGETS = {"1d": "cost_per_day", "24h": "cost_per_day", "7d": "cost_per_week", "30d": "cost_per_month", "1mo": "cost_per_month"}
_ALL = "all-proxy-models"
_TEAMS = "all-team-models"
_ELSEWHERE = ("model_max_budget", "budget_id", "allowed_routes", "model_rpm_limit", "model_tpm_limit", "budget_limits")
"""Fields that restrict a key and do not exist here; those for models may be in its ``metadata``."""


class FormatError(Exception):
    """The text is not a list of LiteLLM's keys; the message says why."""


@dataclass(frozen=True, slots=True)
class LiteLlmKey:
    """One key. ``more``: the fields of its entry besides id and hash; ``left_out``: descriptions of restrictions that do not exist here."""

    alias: str | None
    hash: str
    more: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def keys_of(text: str) -> Iterator[LiteLlmKey]:
    """Yield the keys of a list. Raises FormatError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError("the file starts like JSON but is not valid JSON") from None
    listed = document.get("keys") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise FormatError("the JSON has no list of keys")
    for number, one in enumerate(listed, 1):
        yield _key(number, {"token": one} if isinstance(one, str) else one)


def _key(number: int, one: object) -> LiteLlmKey:
    token = one.get("token") if isinstance(one, dict) else None
    hashed = _HASH.fullmatch(token) if isinstance(token, str) else None
    if not isinstance(one, dict) or hashed is None:
        raise FormatError(f"key {number} has no `token` that is a SHA-256 in hexadecimal digits")
    alias, team = one.get("key_alias"), one.get("team_id")
    if not isinstance(alias, str | None) or not isinstance(team, str | None):
        raise FormatError(f"key {number} has a key_alias or a team_id that is not text")
    limits = {name: one[theirs] for theirs, name in _LIMITS.items() if one.get(theirs)} | _budget(one)
    more = {"models": _models(one), "expires": one.get("expires"), "limits": limits, "revoked": one.get("blocked") is True, "team": team}
    return LiteLlmKey(alias, f"sha256:{hashed[1].lower()}", {name: value for name, value in more.items() if value}, tuple(_left_out(one)))


def _models(one: Mapping[str, Any]) -> Any:
    models = one.get("models")
    return [model for model in models if model not in (_ALL, _TEAMS)] if isinstance(models, list) else models


def _budget(one: Mapping[str, Any]) -> dict[str, Any]:
    name = _BUDGETS.get(str(one.get("budget_duration")))
    return {name: one["max_budget"]} if name is not None and one.get("max_budget") else {}


def _left_out(one: Mapping[str, Any]) -> Iterator[str]:
    if one.get("max_budget") is not None and not _budget(one):
        yield f"max_budget {_budget_text(one)}"
    elif one.get("max_budget") and one.get("spend"):
        yield "spend (its budget restarts at 0)"
    yield from (f"{theirs} 0 (a limit here is 1 or more)" for theirs in _LIMITS if one.get(theirs) == 0)
    if isinstance(one.get("models"), list) and _TEAMS in one["models"]:
        yield _TEAMS if _models(one) else f"{_TEAMS} (it may use all models here)"
    metadata = one.get("metadata")
    within = (one, metadata) if isinstance(metadata, dict) else (one,)
    yield from (name for name in _ELSEWHERE if any(each.get(name) for each in within))


def _budget_text(one: Mapping[str, Any]) -> str:
    duration = one.get("budget_duration")
    if not one["max_budget"]:
        return "0 (a limit here is more than 0)"
    if duration is None:
        return "without budget_duration (a limit here is for a day, a week or a month)"
    return "with a budget_duration other than a day, a week or a month"
