"""Which requests are continued, and how: the plan follows the table of docs/continuation.md."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.routes import Dialect
from gateway.continuation.plan import Path, Plan, plan_of
from gateway.snapshot.snapshot import Resume
from tests.vllm.continuation import CHAT, COMPLETIONS, CONTINUED, MESSAGES, REGENERATED, RESPONSES, ROWS, Row, stored

DIALECTS = {CHAT: Dialect.CHAT, COMPLETIONS: Dialect.COMPLETIONS, MESSAGES: Dialect.MESSAGES, RESPONSES: Dialect.RESPONSES}
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
BY_IDS, AGAIN = Plan(Path.TOKEN_IDS), Plan(Path.REGENERATION)


def chat(resume: Resume = Resume.EXACT, *, scale_out: bool = True, **fields: Any) -> Plan | None:
    return plan_of({**HELLO, **fields}, Dialect.CHAT, resume, lambda: scale_out)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path} {row.feature}")
def test_a_plan_is_a_path_that_the_table_proves(row: Row) -> None:
    outcome = stored()[row.path, row.feature]["outcome"]
    plan = plan_of({"model": "m", "stream": True, **row.body}, DIALECTS[row.path], Resume.EXACT, lambda: True)
    if plan is not None and plan.path is Path.TOKEN_IDS:
        assert outcome == CONTINUED
    elif plan is not None:
        assert outcome in (CONTINUED, REGENERATED), "a second response is exact there, too"
    else:
        assert outcome not in (CONTINUED, REGENERATED)


def test_a_field_that_was_not_proved_needs_a_second_response() -> None:
    assert chat(temperature=0) == BY_IDS
    assert chat(temperature=0, a_new_field=1) == AGAIN
    assert chat(temperature=0, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]) == AGAIN
    assert chat(temperature=0, messages=[{"role": "user", "content": [{"type": "text", "text": "t"}]}]) == BY_IDS
    assert chat(temperature=0, n=2) == chat(temperature=0, presence_penalty=1) == chat(temperature=0, return_token_ids=True) == AGAIN


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("presence_penalty", 0, 0.1),
        ("logprobs", False, True),
        ("n", 1, 2),
        ("stop", [], ["a"]),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("structured_outputs", None, {"choice": ["a"]}),
        ("tool_choice", "auto", "required"),
        ("include_reasoning", True, False),
    ],
)
def test_a_field_with_its_default_changes_nothing(name: str, default: Any, other: Any) -> None:
    fields: dict[str, Any] = {name: default}
    assert chat(temperature=0, **fields) == BY_IDS
    assert chat(temperature=0, **fields | {name: None}) == BY_IDS
    assert chat(temperature=0, **fields | {name: other}) == AGAIN


def test_a_chat_needs_the_routes_for_token_ids() -> None:
    assert chat(temperature=0, scale_out=False) == AGAIN
    assert plan_of({"model": "m", "prompt": "p", "temperature": 0}, Dialect.COMPLETIONS, Resume.EXACT, lambda: False) == BY_IDS


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2]], []])
def test_several_prompts_are_not_continued_by_token_ids(prompt: object) -> None:
    assert plan_of({"model": "m", "prompt": prompt, "temperature": 0}, Dialect.COMPLETIONS, Resume.EXACT, lambda: True) == AGAIN


@pytest.mark.parametrize(
    ("stop", "overlap"),
    [
        (None, 0),
        ([], 0),
        ("a", 0),
        ("abc", 2),
        (["ab", "世界和平", "c"], 3),
        ("a" * 1000, 999),
        ("a" * 1001, None),
        (["a", ""], None),
        ([1], None),
    ],
)
def test_a_completion_overlaps_by_the_longest_stop_string_without_its_last_character(stop: object, overlap: int | None) -> None:
    body = {"prompt": "p", "stop": stop, "include_stop_str_in_output": True}
    expected = AGAIN if overlap is None else Plan(Path.TOKEN_IDS, overlap=overlap)
    assert plan_of({**body, "temperature": 0}, Dialect.COMPLETIONS, Resume.EXACT, lambda: False) == expected
    sampled = None if overlap is None or overlap else Plan(Path.TOKEN_IDS, sampled=True)
    assert plan_of({**body, "temperature": 1}, Dialect.COMPLETIONS, Resume.SAMPLED, lambda: False) == sampled


@pytest.mark.parametrize(
    ("tools", "is_continued"),
    [
        (None, True),
        ([], True),
        ([{"type": "function", "name": "a"}], True),
        ([{"type": "function", "name": "a"}, {"type": "mcp"}], False),
        ([{"type": "code_interpreter"}], False),
        ([{}], False),
        (["function"], False),
        ({"type": "function"}, False),
    ],
)
def test_a_response_with_tools_that_its_server_calls_is_not_made_again(tools: object, is_continued: bool) -> None:
    document = {"input": "Hello", "temperature": 0, "tools": tools}
    assert plan_of(document, Dialect.RESPONSES, Resume.EXACT, lambda: True) == (AGAIN if is_continued else None)


def test_a_chat_with_stop_strings_needs_a_second_response() -> None:
    """vLLM's parsers get the text later than its tokens, and may show markup as content. ``derender`` has no such delay."""
    assert chat(temperature=0, stop=["a"]) == AGAIN
    assert chat(temperature=0, stop=[]) == BY_IDS


def test_a_sampled_response_is_continued_only_where_the_operator_accepts_another_rest() -> None:
    assert chat() is None
    assert chat(temperature=0.7) is None
    assert chat(Resume.SAMPLED) == chat(Resume.SAMPLED, temperature=0.7) == Plan(Path.TOKEN_IDS, sampled=True)
    assert chat(Resume.SAMPLED, temperature=0) == BY_IDS
    assert chat(Resume.SAMPLED, temperature=0.7, seed=1) == chat(temperature=0.7, seed=1) == AGAIN, "the same response again"
    assert chat(Resume.SAMPLED, structured_outputs={"choice": ["a"]}) is None


def test_nothing_is_continued_without_the_setting() -> None:
    assert chat(Resume.OFF, temperature=0) is None
    assert plan_of({"temperature": 0}, Dialect.PLAIN, Resume.EXACT, lambda: True) is None
