"""The simulator's pure parts: tokens, words, schemas, and which tokens a request is answered with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.support.rows import each_row
from upstream.simulator.behavior import Behavior
from upstream.simulator.engine.prefix_cache import PrefixCache
from upstream.simulator.text import json_schema, tokenizer
from upstream.simulator.text.parser import Parser
from upstream.simulator.text.plan import GenerationRequest, Prompt, Token, TokenKind, Tool, plan
from upstream.simulator.text.speaker import Speaker


@given(some.text())
def test_every_text_survives_its_tokens(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= number < 2**49 for number in ids)


@given(some.lists(some.integers(0, 2**63 - 1)))
def test_any_ids_have_a_text(ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)


@given(some.integers(0, 2**64), some.integers(0, 300))
def test_a_speaker_says_exactly_as_many_pieces_as_requested(seed: int, count: int) -> None:
    pieces = Speaker(seed).pieces(count)
    assert len(pieces) == count
    assert pieces == Speaker(seed).pieces(count)


SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["a"]}, {"a": True}),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [0, 0]),
    ({"type": "integer", "minimum": 5, "multipleOf": 4}, 8),
    ({"type": "integer", "exclusiveMinimum": 5}, 6),
    ({"type": "integer", "maximum": -3}, -3),
    ({"type": "number"}, 0.5),
    ({"type": "number", "minimum": 5}, 5),
    ({"type": "object", "properties": {"a": True}, "required": ["a"]}, {"a": {}}),
    ({"enum": ["x", "y"]}, "x"),
    ({"const": 7}, 7),
    ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
    ({"type": ["boolean", "null"]}, True),
    ({"$defs": {"d": {"const": 1}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}, "required": ["a"]}, {"a": 1}),
    (
        {"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"b": {"const": 2}}, "required": ["b"]}]},
        {"a": 1, "b": 2},
    ),
    ({"allOf": [{"type": "integer", "minimum": 5}, {"multipleOf": 4}]}, 8),
    ({"type": "string", "pattern": "^a{2}b$"}, "aab"),
]


@each_row(("given_schema", "wanted"), SCHEMAS)
def test_a_schema_has_a_small_instance(given_schema: dict[str, Any], wanted: Any) -> None:
    assert json_schema.instance(given_schema, Speaker(0)) == wanted


def test_lengths_bound_a_string() -> None:
    assert len(json_schema.instance({"type": "string", "minLength": 40, "maxLength": 40}, Speaker(0))) == 40
    assert len(json_schema.instance({"type": "string", "maxLength": 2}, Speaker(0))) <= 2


def test_an_object_has_as_many_properties_as_required() -> None:
    made = json_schema.instance({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "minProperties": 3}, Speaker(0))
    assert len(made) == 3 and made["a"] == 1


@pytest.mark.parametrize("bad", [{"type": "nothing"}, {"$ref": "#/no"}, {"type": "object", "properties": {"a": 5}, "required": ["a"]}])
def test_an_invalid_schema_is_reported(bad: dict[str, Any]) -> None:
    with pytest.raises(json_schema.UnsatisfiableSchemaError):
        json_schema.instance(bad, Speaker(0))


def test_an_endless_schema_is_reported() -> None:
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}
    with pytest.raises(json_schema.UnsatisfiableSchemaError):
        json_schema.instance(endless, Speaker(0))


@pytest.mark.parametrize(
    "pattern", ["[ab]{3}", r"\d{3}-\d{2}", "(yes|no)", "^a+b*c?$", "x{2,5}", "[^a]", r"\w+@\w+\.(com|org)", "(?:ab){2}"]
)
def test_a_simple_expression_is_matched_whole(pattern: str) -> None:
    assert re.fullmatch(pattern, json_schema.matching(pattern, Speaker(0)))


@pytest.mark.parametrize("pattern", ["(", "[", "(?=a)b(?=c)c{3}"])
def test_an_expression_that_cannot_be_met_is_reported(pattern: str) -> None:
    with pytest.raises(json_schema.UnsatisfiableSchemaError):
        json_schema.matching(pattern, Speaker(0))


def generation_request(**more: Any) -> GenerationRequest:
    return GenerationRequest((Prompt.of_text("Hello"),), **{"limit": 1000, **more})


@given(some.integers(1, 200), some.integers(1, 200), some.booleans())
def test_a_plan_keeps_the_length_and_the_limit(wanted: int, limit: int, thinking: bool) -> None:
    (choice,) = plan(
        generation_request(limit=limit, thinking=thinking), Behavior(tokens=wanted, reasoning_tokens=1 if thinking else None), 0
    ).choices
    assert len(choice.tokens) <= limit
    assert (choice.finish == "stop") == (choice.tokens[-1].piece == tokenizer.END)


TOOL = Tool("look_at_it", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})


@given(some.integers(0, 9), some.booleans(), some.integers(0, 2), some.integers(0, 40))
def test_a_started_response_is_continued_with_exactly_its_rest(seed: int, thinking: bool, calls: int, cut: int) -> None:
    request = generation_request(seed=seed, thinking=thinking, calls=(TOOL,) * calls)
    (whole,) = plan(request, Behavior(), 0).choices
    ids = [token.id for token in whole.tokens]
    cut = min(cut, len(ids) - 1)
    prompt = Prompt.of_ids([*request.prompts[0].ids, *ids[:cut]])
    (rest,) = plan(replace(request, prompts=(prompt,), limit=request.limit - cut), Behavior(), 0).choices
    assert [token.id for token in rest.tokens] == ids[cut:]
    assert rest.finish == whole.finish


def test_a_response_that_the_prompt_did_not_start_so_is_a_new_one() -> None:
    hello = generation_request().prompts[0]
    other = Prompt.of_ids([*hello.ids, tokenizer.generated("other")])
    (choice,) = plan(replace(generation_request(), prompts=(other,)), Behavior(tokens=9), 0).choices
    assert len(choice.tokens) == 9


@given(some.integers(0, 9), some.booleans(), some.integers(0, 2))
def test_the_parser_finds_what_was_planned(seed: int, thinking: bool, calls: int) -> None:
    (choice,) = plan(generation_request(seed=seed, thinking=thinking, calls=(TOOL,) * calls), Behavior(), 0).choices
    parser = Parser(thinking=thinking)
    assert tuple(parser.token(token.piece) for token in choice.tokens) == choice.tokens


@given(some.integers(0, 30), some.lists(some.sampled_from(["the", " a", "ow", "en", "nothing like it"]), min_size=1, max_size=3))
def test_no_start_of_a_stop_string_is_shown(seed: int, stops: list[str]) -> None:
    (free,) = plan(generation_request(seed=seed), Behavior(), 0).choices
    (choice,) = plan(generation_request(seed=seed, stops=tuple(stops)), Behavior(), 0).choices
    text, produced = "", ""
    for token in choice.tokens[:-1]:
        text, produced = text + token.text, produced + token.piece
        assert produced.startswith(text)
        assert len(text) <= max(0, len(produced) - max(map(len, stops)) + 1)
    content = "".join(token.text for token in free.tokens)
    found = [content.find(stop) for stop in stops if stop in content]
    assert text + choice.tokens[-1].text in ([content[:at] for at in found] or [content])


def test_reasoning_comes_before_the_content_and_its_end_is_silent() -> None:
    (choice,) = plan(generation_request(thinking=True), Behavior(tokens=20, reasoning_tokens=5), 0).choices
    kinds = [token.kind for token in choice.tokens]
    assert kinds == [TokenKind.REASONING] * 5 + [TokenKind.SILENT] + [TokenKind.CONTENT] * 13 + [TokenKind.SILENT]


def test_a_preface_begins_the_text_and_nothing_else() -> None:
    behavior = Behavior(tokens=20, reasoning_tokens=5, preface="It is made up.")
    (choice,) = plan(generation_request(thinking=True), behavior, 0).choices
    shown = {kind: "".join(token.text for token in choice.tokens if token.kind is kind) for kind in TokenKind}
    assert shown[TokenKind.CONTENT].startswith("It is made up.\n\n") and "made up" not in shown[TokenKind.REASONING]


@given(some.text(min_size=1, max_size=3), some.integers(0, 50))
def test_nothing_is_shown_from_a_stop_string_on(stop: str, seed: int) -> None:
    (free,) = plan(generation_request(seed=seed), Behavior(tokens=60), 0).choices
    (stopped,) = plan(generation_request(seed=seed, stops=(stop,)), Behavior(tokens=60), 0).choices
    text = "".join(token.text for token in free.tokens)
    assert "".join(token.text for token in stopped.tokens) == text.split(stop)[0]
    assert stopped.stop == (stop if stop in text else None)


@given(some.sampled_from(["the", " a", "o", "en"]), some.integers(0, 20), some.integers(0, 40))
def test_a_stop_string_counts_after_the_least_number_of_tokens(stop: str, seed: int, minimum: int) -> None:
    (free,) = plan(generation_request(seed=seed), Behavior(tokens=60), 0).choices
    request = generation_request(seed=seed, stops=(stop,), minimum=minimum, includes_stop=True)
    (stopped,) = plan(request, Behavior(tokens=60), 0).choices
    whole, least = _texts(free.tokens), len(_texts(free.tokens[:minimum]))
    found = [at + len(stop) for at in range(len(whole)) if whole.startswith(stop, at) and at + len(stop) > least]
    assert _texts(stopped.tokens) == (whole[: found[0]] if found else whole)


def _texts(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_a_prefix_is_known_by_whole_blocks_and_never_whole() -> None:
    cache = PrefixCache()
    ids = tuple(range(64))
    assert cache.allocate(ids, "").cached == 0
    assert cache.allocate(ids, "").cached == 48
    assert cache.allocate((*ids, 1), "").cached == 64
    assert cache.allocate((*ids[:20], 0), "").cached == 16
    assert cache.allocate(ids, "salt").cached == 0
    assert cache.allocate((), "").cached == 0


def test_blocks_in_use_are_counted_once_and_not_evicted() -> None:
    cache = PrefixCache(block_size=2, capacity=4)
    first, second = cache.allocate((1, 2, 3, 4, 5), ""), cache.allocate((1, 2, 6, 7), "")
    assert cache.used == 3
    cache.free(first)
    assert cache.used == 2
    cache.free(cache.allocate((8, 9, 10, 11), ""))
    assert cache.allocate((1, 2, 3, 4, 5), "").cached == 2, "the end of the first prompt was used least recently"
    cache.free(second)
