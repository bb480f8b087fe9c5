"""Count the choices and the prompts of a request. Pure.

The source is vLLM 0.32: ``n`` is the number of choices for each prompt, and also the width of a beam search. It has no ``best_of``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.api.vllm.lax_int import lax_int


def choices_and_prompts(document: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of choices for each prompt, and the number of prompts. A list of token IDs is one prompt."""
    n, prompts = document.get("n"), 0
    for name in ("prompt", "prompt_embeds"):
        value = document.get(name)
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            prompts += len(value)
        elif value is not None:
            prompts += 1
    if n is not None and type(n) is not int:
        n = lax_int(n)
    return n if n is not None and n > 1 else 1, prompts or 1
