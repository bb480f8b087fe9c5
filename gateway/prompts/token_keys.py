"""Add the keys of its token IDs to a prompt, if a server of its model publishes KV cache events.

The rules: a model without such a server costs nothing. The IDs are requested when the request is ready to be sent, so that nothing else
waits for them, and the time is bounded. A prompt without keys is compared by its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.auth.catalog import CatalogEntry
from gateway.prompts.token_plan import TokenPlan, token_plan
from upstream.balancing.cost_model import Prompt
from upstream.balancing.engine_caches import EngineCaches
from upstream.vllm.kv_events.keys import prompt_keys
from upstream.vllm.tokenize import Tokenization

MOST_BYTES = 512 * 1024
"""Bytes of a body whose token IDs are requested: about 130,000 tokens, which take some milliseconds."""


class TokenRequest(NamedTuple):
    """The way to the keys of a prompt: the caches of its model's servers, the plan for its token IDs, and the body of their request."""

    caches: EngineCaches
    plan: TokenPlan
    body: bytes


def token_request(
    caches: EngineCaches | None, document: Mapping[str, Any], path: str, size: int, model: CatalogEntry
) -> TokenRequest | None:
    """Return what adds keys to the prompt of a request; None if that is not possible, or of no use.

    ``size``: bytes of the request's body. ``path``: the server's route.
    """
    if caches is None or not caches.block_sizes or size > MOST_BYTES:
        return None
    if (plan := token_plan(document, path)) is None:
        return None
    servers = model.pool.servers
    served = model.model.served or (servers[0].spec.model if servers else model.model.id)
    return TokenRequest(caches, plan, b"" if plan.fields is None else plan.body(served))


async def add_token_keys(prompt: Prompt, request: TokenRequest, model: CatalogEntry, tokenization: Tokenization) -> None:
    """Request the token IDs, and add their keys to the prompt. It stays as it is if they are not known in time."""
    caches, plan, body = request
    if (ids := plan.token_ids) is None:
        server = model.pool.less_busy_of_two()
        ids = None if server is None else await tokenization.token_ids(server, body)
    if ids is not None:
        adapter = model.model.served if model.model.parent is not None else None
        prompt.tokens = len(ids)
        prompt.token_keys = {size: prompt_keys(ids, size, adapter, plan.salt) for size in caches.block_sizes}
