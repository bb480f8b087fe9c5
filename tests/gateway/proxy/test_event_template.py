"""A template is made only from a value in which two events differ."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.proxy.event_template import TemplateLearner
from tests.support.examples import examples

CHAT = '{"id":"1","choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}'


def event(text: str, document: str = CHAT) -> bytes:
    return b"data: %b\n\n" % (document % orjson.dumps(text).decode()).encode()


def learned(*events: bytes, closing: bytes = b"") -> tuple[bytes, bytes] | None:
    learner = TemplateLearner(closing)
    return [learner.compare(each) for each in events][-1]


def test_the_template_of_a_stream_is_around_its_text() -> None:
    before, after = event("@").split(b"@")
    for one, other in (("a", "b"), (" the", " then"), ("cat", "hat"), ("", "x"), ("aa", "a"), ("a,", "b,"), ("content", "other")):
        assert learned(event(one), event(other)) == (before, after)


def test_an_event_without_its_end_has_a_template() -> None:
    one, other = (event(text).removesuffix(b"}\n\n") for text in ("a", "b"))
    assert learned(one, other, closing=b"}\n\n") == (event("@").split(b"@")[0], b'"},"finish_reason":null}]')
    assert learned(one, other) is None


def test_an_event_with_a_type_has_a_template() -> None:
    document = '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%s}}'
    one, other = (b"event: content_block_delta\n" + event(text, document) for text in ("a", "b"))
    found = learned(one, other)
    assert found is not None and found[0].endswith(b'"text":"') and found[1] == b'"}}\n\n'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'data: {"a":1}\n\n', b'data: {"a":2}\n\n'),
        (b'data: {"number":1,"delta":"a"}\n\n', b'data: {"number":2,"delta":"b"}\n\n'),
        (b'data: {"a":{"one":1}}\n\n', b'data: {"a":{"two":1}}\n\n'),
        (b'data: {"a":{"one" :1}}\n\n', b'data: {"a":{"two" :1}}\n\n'),
        (b'data: {"a":"x"}\n\n', b'data: {"b":"y"}\n\n'),
        (b"data: one\n\n", b"data: two\n\n"),
        (b'data: "a", "b"}\n\n', b'data: "c", "b"}\n\n'),
        (b"data: [DONE]\n\n", b"data: [DONE]\n\n"),
        (b'data: {"a":"\\"x\\""}\n\n', b'data: {"a":"\\"y\\""}\n\n'),
    ],
)
def test_other_differences_have_no_template(one: bytes, other: bytes) -> None:
    assert learned(one, other) is None


def test_the_attempts_are_bounded() -> None:
    learner = TemplateLearner()
    for number in range(5):
        assert learner.attempts
        assert learner.compare(b'data: {"a":%d}\n\n' % number) is None
    assert not learner.attempts


NAMES = st.sampled_from(["usage", "error", "content", "text", "a"])
VALUES = st.recursive(
    st.text("ab:,{}[]", max_size=4) | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_an_event_of_a_template_has_the_same_fields(document: dict[str, object], data: st.DataObject) -> None:
    texts = st.text("ab :,{}[]é", max_size=6)
    one, other, third = data.draw(texts), data.draw(texts), data.draw(st.text(st.characters(exclude_characters='"\\'), max_size=9))
    document["choices"] = [{"text": "@@"}, data.draw(VALUES)]
    source = orjson.dumps(document)
    template = learned(*(b"data: %b\n\n" % source.replace(b'"@@"', orjson.dumps(text), 1) for text in (one, other)))
    if template is not None:
        start, end = template
        made = orjson.loads((start + orjson.dumps(third)[1:-1] + end).removeprefix(b"data: "))
        first = orjson.loads(source.replace(b'"@@"', orjson.dumps(one), 1))
        assert _shape(made) == _shape(first)


def _shape(node: object) -> object:
    """Return a document with all of its strings replaced: its names, numbers and structure."""
    if isinstance(node, dict):
        return {name: _shape(value) for name, value in node.items()}
    return [_shape(value) for value in node] if isinstance(node, list) else "" if isinstance(node, str) else node
