"""The drawn requests have every feature, and the reference requests show the prompt tokens of each of them."""

from __future__ import annotations

from random import Random

from tests.accounting.workload import KINDS, ROUTES, THINKING, draw, reference_requests


def test_a_seed_always_draws_the_same_requests_and_all_kinds() -> None:
    drawn = [[draw(rng, number, 0.3) for number in range(500)] for rng in (Random(3), Random(3))]
    assert drawn[0] == drawn[1]
    assert {request.kind for request in drawn[0]} == set(KINDS) and {request.path for request in drawn[0]} == set(ROUTES)
    assert {request.choices for request in drawn[0]} == {1, 2, 3}
    assert {request.streamed for request in drawn[0]} == {True, False}
    assert 100 < sum(request.disconnect is not None for request in drawn[0]) < 200


def test_each_prompt_has_a_reference() -> None:
    references = {(request.kind, request.texts[0]) for request in reference_requests()}
    for number in range(500):
        request = draw(Random(number), number, 0.0)
        kind = request.kind if len(request.texts) == 1 else "completion"
        assert {(kind, text) for text in request.texts} <= references
        assert request.path not in ("/v1/responses", "/v1/messages") or (THINKING, request.texts[0]) in references
