"""The numbers of choices and prompts, as vLLM counts them."""

from __future__ import annotations

from typing import Any

from gateway.api.vllm.choices import choices_and_prompts
from tests.support.rows import each_row


@each_row(
    ("document", "expected"),
    [
        ({}, (1, 1)),
        ({"n": 3}, (3, 1)),
        ({"n": "3"}, (3, 1)),
        ({"n": None, "prompt": "a"}, (1, 1)),
        ({"n": 0, "prompt": ["a"]}, (1, 1)),
        ({"n": 2, "prompt": ["a", "b", "c"]}, (2, 3)),
        ({"prompt": [1, 2, 3]}, (1, 1)),
        ({"prompt": [[1, 2], [3]]}, (1, 2)),
        ({"prompt": []}, (1, 1)),
        ({"prompt": "a", "prompt_embeds": ["x", "y"]}, (1, 3)),
        ({"prompt_embeds": "x"}, (1, 1)),
    ],
)
def test_choices_and_prompts(document: dict[str, Any], expected: tuple[int, int]) -> None:
    assert choices_and_prompts(document) == expected
