"""Redaction: no value of a configured field is left, wherever it is and however a stream was cut."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.recording.redaction import MARK, NotParsedError, Redactor, Removed, scrubbed

SECRET = "hidden-value"
NAMES = st.text(max_size=8).filter(lambda name: name not in ("password", "extra_body"))
LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
HOLDERS = st.sampled_from(
    [SECRET, [SECRET], {"a": {"b": [SECRET]}}, {SECRET: 1}, f"before {SECRET} after", [[{"text": SECRET}], None]],
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """An object that has a field ``password`` with the secret somewhere."""
    value: Any = {**draw(st.dictionaries(NAMES, VALUES, max_size=3)), "password": draw(HOLDERS)}
    for _ in range(draw(st.integers(0, 6))):
        value = [draw(VALUES), value] if draw(st.booleans()) else {draw(NAMES): value, "more": draw(VALUES)}
    return value if isinstance(value, dict) else {"items": value}


@given(documents())
def test_a_name_is_redacted_at_any_depth(document: dict[str, Any]) -> None:
    body, removed = Redactor(["password"]).request(orjson.dumps(document))
    assert SECRET.encode() not in body
    assert any(SECRET in text for text in removed.texts)


@given(documents())
def test_other_fields_stay(document: dict[str, Any]) -> None:
    body, removed = Redactor(["another"]).request(orjson.dumps(document))
    assert orjson.loads(body) == document or "another" in str(document)
    assert removed == Removed() or "another" in str(document)


@pytest.mark.parametrize(
    ("entry", "document", "expected"),
    [
        ("messages.*.content", {"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "user", "content": MARK}]}),
        ("messages.0.content", {"messages": [{"content": 1}, {"content": 2}]}, {"messages": [{"content": MARK}, {"content": 2}]}),
        ("metadata.*", {"metadata": {"a": 1, "b": [2]}}, {"metadata": {"a": MARK, "b": MARK}}),
        ("a.b", {"a": {"b": {"c": 1}}, "b": 2}, {"a": {"b": MARK}, "b": 2}),
        ("a.b", {"x": {"a": {"b": 1}}}, {"x": {"a": {"b": 1}}}),  # a path starts at the top
        ("a.b", {"a": "b"}, {"a": "b"}),
        ("a.b", {"extra_body": {"a": {"b": 1}}}, {"extra_body": {"a": {"b": MARK}}}),  # its fields are merged into the body
        ("user", {"user": None, "users": "x"}, {"user": MARK, "users": "x"}),
    ],
)
def test_a_path_leads_from_the_top(entry: str, document: dict[str, Any], expected: dict[str, Any]) -> None:
    assert Redactor([entry]).redact(document) == expected


def test_a_value_that_was_moved_to_another_field_is_redacted_in_the_sent_body() -> None:
    received = orjson.dumps({"model": "m", "guided_regex": SECRET, "functions": [{"name": SECRET}], "prompt": "a"})
    moved = {"model": "served", "structured_outputs": {"regex": f"^{SECRET}$"}, "tools": [{"function": {"name": SECRET}}], "prompt": "a"}
    redactor = Redactor(["guided_regex", "functions"])
    _, removed = redactor.request(received)
    sent = redactor.sent(orjson.dumps(moved), received, removed)
    assert SECRET.encode() not in sent
    assert (orjson.loads(sent)["prompt"], orjson.loads(sent)["model"]) == ("a", "served")


def test_an_error_that_quotes_a_removed_value_is_redacted() -> None:
    error = orjson.dumps({"error": {"message": f"invalid value '{SECRET}'", "code": 400}})
    removed = Removed({SECRET})
    redactor = Redactor(["user"])
    assert SECRET.encode() not in redactor.response(error, 400, removed)
    assert SECRET.encode() in redactor.response(error, 200, removed)  # a text of the model is another field
    assert SECRET.encode() not in redactor.event(b"event: error\ndata: " + error + b"\n\n", removed)


def test_too_many_removed_texts_hide_every_text() -> None:
    removed = Removed({f"text {n}" for n in range(1001)})
    assert scrubbed({"a": ["unrelated"], "b": 1}, removed) == {MARK: MARK}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b"data"])
def test_a_body_that_is_not_an_object_is_not_stored(body: bytes) -> None:
    redactor = Redactor(["user"])
    with pytest.raises(NotParsedError):
        redactor.request(body)
    with pytest.raises(NotParsedError):
        redactor.response(body, 200, Removed())


def test_an_event_keeps_its_name_and_its_end_and_loses_its_comments() -> None:
    redactor = Redactor(["text"])
    event = b': comment hidden-value\nevent: delta\nid: hidden-value\ndata: {"text":"hidden-value","n":1}\n\n'
    assert redactor.event(event, Removed()) == b'event: delta\ndata: {"text":"[redacted]","n":1}\n\n'
    assert redactor.event(b"data: [DONE]\n\n", Removed()) == b"data: [DONE]\n\n"
    assert redactor.event(b": keep-alive\n\n", Removed()) == b""
    with pytest.raises(NotParsedError):
        redactor.event(b"data: hidden-value\n\n", Removed())


def test_a_document_that_is_nested_too_deeply_to_be_written_is_not_stored() -> None:
    with pytest.raises(NotParsedError):
        Redactor(["user"]).response(b'{"a":' * 500 + b"1" + b"}" * 500, 200, Removed())
