"""The model list as clients read it: an entry for each model and each alias, and the pages of the list. Pure.

One list serves several kinds of clients: OpenAI's SDKs, vLLM's (``max_model_len``), Anthropic's SDK (``type``, ``display_name``,
``created_at``, ``lifecycle`` and pages) and tools that read OpenRouter's fields (``context_length``, ``architecture``,
``supported_parameters``, ``pricing``) or the state from llama.cpp's router (``status``). The rule: an unknown fact is absent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from math import ceil
from typing import Any

from gateway.api.errors import Refusal
from gateway.snapshot.link import Health
from gateway.snapshot.money import NANO, Price
from gateway.snapshot.snapshot import Model
from upstream.balancing.server import Condition

Card = dict[str, Any]

MOST_ON_A_PAGE = 1000
"""The limit of Anthropic's API."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "tools": ("tools", "tool_choice"),
    "reasoning": ("reasoning", "include_reasoning"),
    "structured_outputs": ("structured_outputs", "response_format"),
}
"""The request fields of a capability, with OpenRouter's names."""
MODALITIES = ("image", "audio", "video")
"""The capabilities that are kinds of input in addition to text."""
_GENERATING = frozenset({"chat", "completion"})
_PER_TOKEN = Decimal(NANO) * 1_000_000


def card(model: Model, reported: Health) -> Card:
    """Return the entry of a model under its ID. An adapter names its base in ``parent``, as in vLLM's list.

    ``reported`` has the context length and the task that servers report about it.
    """
    shown: Card = {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "vllm-gateway",
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "aliases": list(model.aliases),
    }
    if model.parent is not None:
        shown["parent"] = model.parent
    if (task := model.task or reported.tasks.get(model.id)) is not None:
        shown["task"] = task
    if (length := reported.max_model_len.get(model.id)) is not None:
        shown |= dict.fromkeys(("max_model_len", "context_length", "context_window", "max_input_tokens"), length)
    if model.price is not None:
        shown["pricing"] = pricing(model.price)
    if not model.split:
        shown["status"] = _status(model, reported, time.monotonic())
    return shown | _abilities(model, task)


def pricing(price: Price) -> Card:
    """Return the prices of a token, with OpenRouter's names: exact decimals in the operator's currency."""
    named = {
        "prompt": price.prompt,
        "completion": price.completion,
        "input_cache_read": price.cached,
        "internal_reasoning": price.reasoning,
    }
    return {name: f"{(nano / _PER_TOKEN).normalize():f}" for name, nano in named.items()}


def _status(model: Model, reported: Health, now: float) -> Card:
    """Return the state of a model: whether a server serves it. ``retry_after``: seconds until a request may be served."""
    conditions = {reported.conditions.get(server.name) for server in model.servers}
    if Condition.UP in conditions:
        return {"value": "loaded"}
    expected = reported.expected.get(model.base)
    return {
        "value": "loading" if Condition.LOADING in conditions else "unloaded",
        **({} if expected is None else {"retry_after": max(ceil(expected - now), 0)}),
    }


def _abilities(model: Model, task: str | None) -> Card:
    """Return the fields about the model's capabilities. Capabilities from the launch arguments apply to generating models only."""
    if (capabilities := model.capabilities) is None:
        capabilities = model.launched_with if task in _GENERATING else None
        modalities = None
    else:
        modalities = [] if task == "transcription" else ["text"]
        modalities += [kind for kind in MODALITIES if kind in capabilities]
    if capabilities is None:
        return {}
    parameters = [name for capability, names in PARAMETERS.items() if capability in capabilities for name in names]
    shown: Card = {"supported_parameters": parameters} if task in _GENERATING else {}
    return shown if modalities is None else shown | {"architecture": {"input_modalities": modalities}}


def cards(models: Iterable[Model], reported: Health) -> list[Card]:
    """Return the entries of all names. An alias has the entry of its model, and names the model in ``root``."""
    found: list[Card] = []
    for model in models:
        own = card(model, reported)
        found.append(own)
        found += [{**own, "id": alias, "root": model.id, "aliases": []} for alias in model.aliases]
    return found


def page(entries: Sequence[Card], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list that a query selects by ``limit``, ``after_id`` and ``before_id``. The default is all.

    Raises Refusal for a limit that is not a number from 1 to ``MOST_ON_A_PAGE``, and for an ID that is not in the list.
    """
    start = _position(entries, query, "after_id") + 1 if "after_id" in query else 0
    end = _position(entries, query, "before_id") if "before_id" in query else len(entries)
    selected = entries[start:end]
    limit = _limit(query["limit"]) if "limit" in query else len(entries)
    shown = selected[-limit:] if "before_id" in query else selected[:limit]
    ids = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "has_more": len(selected) > limit, "first_id": ids[0], "last_id": ids[1]}


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MOST_ON_A_PAGE):
        raise Refusal("invalid_value", f"The parameter 'limit' must be a number from 1 to {MOST_ON_A_PAGE}.", param="limit")
    return int(text)


def _position(entries: Sequence[Card], query: Mapping[str, str], name: str) -> int:
    for position, entry in enumerate(entries):
        if entry["id"] == query[name]:
            return position
    raise Refusal("invalid_value", f"The parameter '{name}' must be the ID of a model in the list.", param=name)
