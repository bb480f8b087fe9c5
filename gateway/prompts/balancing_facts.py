"""Compute the facts of a request that a balance policy requires. Pure.

The rule: only the required facts are computed, so that a policy that requires none costs nothing. The work is a generator, because
the blocks of a large body are computed in steps.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Set
from typing import Any

from gateway.prompts.blocks import prompt_of
from gateway.prompts.prefix import affinity_key
from upstream.balancing.policies.policy import Fact, RequestFacts


def balancing_facts(
    required: Set[Fact], document: Mapping[str, Any], session: bytes | None, adapter: str | None = None
) -> Generator[None, None, RequestFacts]:
    """Return the required facts of a request.

    ``document``: the merged body. ``session``: the value of x-session-id. ``adapter``: the ID of the LoRA adapter that serves the request.
    """
    key = prompt = None
    if "affinity_key" in required:
        key = affinity_key(document, session)
    if "prompt" in required:
        prompt = yield from prompt_of(document, adapter, session)
    return RequestFacts(key, prompt)
