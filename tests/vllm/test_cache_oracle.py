"""The oracle of cached shares: by hand."""

from __future__ import annotations

import pytest

from tests.vllm.cache_oracle import Recorded, cached_share


def test_the_same_prompt_is_cached_but_for_its_last_block() -> None:
    request = Recorded(range(64), [1])
    assert cached_share([request, request], servers=2, blocks=100, size=16) == 48 / 128


def test_salts_share_nothing() -> None:
    assert cached_share([Recorded(range(64), [1], salt) for salt in "abc"], servers=1, blocks=100, size=16) == 0


def test_a_conversation_finds_its_generated_tokens() -> None:
    first = Recorded(range(40), [*range(100, 125)])
    second = Recorded([*range(40), *range(100, 125), 7], [1])
    assert cached_share([first, second], servers=3, blocks=100, size=16) == 64 / (40 + 66)


@pytest.mark.parametrize(("servers", "share"), [(1, 0.0), (2, 0.5)])
def test_two_prompts_that_fit_into_two_caches_only(servers: int, share: float) -> None:
    one, other = Recorded(range(65), [1]), Recorded(range(500, 565), [1])
    found = cached_share([one, other, one, other], servers, blocks=5, size=16)
    assert found == pytest.approx(share * 128 / 130)
