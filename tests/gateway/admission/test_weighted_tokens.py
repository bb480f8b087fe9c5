"""The unit of service, what requests usually need, and that each token is charged once."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.weighted_tokens import KeyUse, SeenTokens, ServiceWeights, TokenCells, Tokens, UsualUse
from gateway.api.usage import Usage


def cells(prompt: float = 0.0, completion: float = 0.0, cached: float = 0.0) -> TokenCells:
    return TokenCells([prompt], [completion], [cached])


def test_service_is_a_weighted_number_of_tokens_without_cached_ones() -> None:
    tokens = Tokens.of(Usage(prompt=100, completion=20, cached=60))
    assert tokens == Tokens(40, 20)
    assert ServiceWeights().service(tokens) == 40 + 4 * 20
    assert ServiceWeights(prompt=0.5, completion=1.0).service(tokens) == 40


def test_before_the_first_request_of_a_key_the_others_are_usual() -> None:
    everyone = UsualUse()
    key = UsualUse(everyone)
    assert key.estimate(400) == (100, 128)
    everyone.learn(Tokens(10, 30), 100)
    assert key.estimate(400) == (40, 30)
    key.learn(Tokens(0, 500), 100)
    assert key.estimate(400) == (0, 500) and UsualUse(everyone).estimate(400) == (40, 30)


def test_an_estimate_is_at_most_what_the_request_allows() -> None:
    key = UsualUse()
    key.learn(Tokens(10, 500), 0)
    assert (key.estimate(1, 20).output, key.estimate(1, inf).output) == (20, 500)


def test_the_mean_follows_a_change() -> None:
    key = UsualUse()
    for _ in range(50):
        key.learn(Tokens(100, 20), 400)
    for _ in range(50):
        key.learn(Tokens(100, 400), 400)
    assert key.output == pytest.approx(400, rel=0.01) and key.per_byte == pytest.approx(0.25)


def test_tokens_are_unseen_once_and_those_of_a_noted_request_never() -> None:
    own, adapter = cells(100, 10, 50), cells()
    key = SeenTokens([own, adapter])
    assert key.take_unseen() == (0, 0), "what was counted before the key was known"
    own.prompt[0] += 30
    own.cached[0] += 10
    adapter.completion[0] += 7
    assert key.take_unseen() == (20, 7) and key.take_unseen() == (0, 0)
    key.note(Tokens(5, 6))
    own.prompt[0] += 5
    own.completion[0] += 6 + 1
    assert key.take_unseen() == (0, 1)


def test_other_counters_do_not_charge_what_they_have_counted_before() -> None:
    own = cells()
    key = SeenTokens([own])
    own.prompt[0] += 2
    own.completion[0] += 3
    key.use([own, cells(1000, 1000)])
    assert key.take_unseen() == (2, 3)


def test_what_another_worker_has_counted_before_it_is_known_is_unseen() -> None:
    first = cells(1, 1)
    key = SeenTokens([first])
    key.add([first, cells(30, 20, 10)])
    assert key.take_unseen() == (20, 20) and key.take_unseen() == (0, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000), st.integers(0, 1000)), max_size=30))
def test_each_token_is_charged_once(requests: list[tuple[bool, int, int]]) -> None:
    """Whether a request waited, and is charged on its own, or not."""
    counters = cells()
    key, charged = SeenTokens([counters]), 0.0
    for waited, prompt, completion in requests:
        if waited:
            key.note(Tokens(prompt, completion))
            charged += prompt + completion
        counters.prompt[0] += prompt
        counters.completion[0] += completion
        charged += sum(key.take_unseen())
    assert charged == sum(prompt + completion for _, prompt, completion in requests)


def test_a_key_has_its_own_use_that_in_other_workers_and_the_usual_one() -> None:
    own, peer, everyone = cells(), cells(), UsualUse()
    use = KeyUse([own], [peer], everyone)
    own.prompt[0] += 1
    peer.completion[0] += 2
    everyone.learn(Tokens(10, 30), 100)
    assert (use.own.take_unseen(), use.peers.take_unseen(), use.usual.estimate(100)) == ((1, 0), (0, 2), (10, 30))
