"""A second response continues the first one exactly, however both are grouped; or it is found to differ before a byte of it is sent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.routes import Dialect
from gateway.continuation import regeneration
from gateway.continuation.regeneration import DifferentError, Regeneration
from gateway.continuation.sent_text import SentText
from tests.gateway.continuation.streams import DONE, Event, Server, Token, Tokens, view_of
from tests.gateway.continuation.test_sent_text import noted
from tests.support.examples import examples
from upstream.http.sse import Splitter

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

T = TypeVar("T")
TEXTS = st.sampled_from(("a", "b", " the", '"', "\\", "\n", "\u00e4\u00df", "\u4f60", "\U0001f600", '{"x":', "\x01", ""))
LETTERS = TEXTS.filter(bool)


@st.composite
def token_lists(draw: st.DrawFn, dialect: Dialect) -> Tokens:
    """Draw the tokens of a choice: some reasoning, and then texts and calls in turn."""
    texts = st.lists(LETTERS, min_size=1, max_size=8)
    if dialect is Dialect.COMPLETIONS:
        return [Token("content", text) for text in draw(st.lists(TEXTS, min_size=1, max_size=20))]
    tokens = [Token("reasoning", text) for text in draw(st.lists(LETTERS, max_size=8))]
    calls = draw(st.lists(st.booleans(), min_size=0 if tokens else 1, max_size=4))
    for number, is_call in enumerate(calls):
        if is_call:
            tokens.append(Token(number, "", draw(st.sampled_from(("f", "weather")))))
        tokens += [Token(number if is_call else "content", text) for text in draw(texts)]
    return tokens


@st.composite
def servers(draw: st.DrawFn, dialect: Dialect) -> Server:
    most = 3 if dialect in (Dialect.CHAT, Dialect.COMPLETIONS) else 1
    choices = draw(st.lists(token_lists(dialect), min_size=1, max_size=most))
    finish = draw(st.sampled_from(("stop", "length")))
    return Server("A", choices, dialect, finish, draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))


DIALECTS = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.MESSAGES, Dialect.RESPONSES)
SERVERS = st.sampled_from(DIALECTS).flatmap(servers)
DICE = st.randoms(use_true_random=False)


def cut(events: Sequence[Event], dice: random.Random) -> tuple[bytes, int]:
    """Cut the bytes of a stream before its last event. Returns the complete events, and their number."""
    whole = b"".join(event.data for event in events)
    sent = Splitter(len(whole)).feed(whole[: dice.randrange(len(whole) - len(events[-1].data) + 1)])
    number, size = 0, 0
    while size < len(sent):
        number, size = number + 1, size + len(events[number].data)
    return sent, number


def complete(events: Sequence[Event], number: int) -> dict[int, int]:
    """Return how many tokens of each choice are in the first events for certain. A group of tokens may have several events."""
    if number == 0 or events[number].counts != events[number - 1].counts:
        return events[number - 1].counts if number else {}
    return next((event.counts for event in reversed(events[:number]) if event.counts != events[number].counts), {})


def fed(one: Regeneration, events: Sequence[Event], dice: random.Random) -> bytes:
    """Feed a stream in random runs of events. Nothing may be returned before a difference."""
    returned, left = b"", [event.data for event in events]
    while left:
        count = dice.choice((1, 1, 2, 5))
        try:
            returned += one.feed(b"".join(left[:count]))
        except DifferentError:
            assert not returned
            raise
        del left[:count]
    return returned


def lost(server: Server, dice: random.Random) -> tuple[list[Event], bytes, SentText]:
    """Return the events of a response, the bytes up to a random cut, and the record of them."""
    events = server.events(dice)
    sent, number = cut(events, dice)
    return events, sent, noted(events[:number], server.dialect, dice)


@settings(max_examples=examples(150), deadline=None)
@given(server=SERVERS, dice=DICE)
def test_a_continued_stream_is_like_an_undisturbed_one(server: Server, dice: random.Random) -> None:
    events, sent, record = lost(server, dice)
    rest = fed(Regeneration(record, server.dialect), replace(server, name="B").events(dice), dice)
    undisturbed = b"".join(event.data for event in events)
    assert view_of(sent + rest, server.dialect) == view_of(undisturbed, server.dialect)


@settings(max_examples=examples(75), deadline=None)
@given(server=SERVERS, dice=DICE)
def test_a_second_continuation_continues_the_first_one(server: Server, dice: random.Random) -> None:
    events, sent, record = lost(server, dice)
    second = replace(server, name="B").events(dice)
    rest = fed(Regeneration(record, server.dialect), second[: dice.randrange(len(second))], dice)
    continued = noted([Event(sent + rest, {})], server.dialect, dice)
    end = fed(Regeneration(continued, server.dialect), server.events(dice), dice)
    assert view_of(sent + rest + end, server.dialect) == view_of(b"".join(event.data for event in events), server.dialect)


@settings(max_examples=examples(150), deadline=None)
@given(server=SERVERS, dice=DICE, added=st.booleans())
def test_another_text_before_the_cut_is_found(server: Server, dice: random.Random, added: bool) -> None:
    events = server.events(dice)
    _, number = cut(events, dice)
    positions = [
        (index, at)
        for index, count in complete(events, number).items()
        for at, token in enumerate(server.choices[index][:count])
        if token.text or token.name
    ]
    if not positions:
        return
    index, at = dice.choice(positions)
    changed = list(server.choices[index])
    token = changed[at]
    changed[at] = token._replace(text="z" + token.text[not added :]) if token.text else token._replace(name=token.name + "z")
    choices = [changed if each == index else tokens for each, tokens in enumerate(server.choices)]
    record = noted(events[:number], server.dialect, dice)
    with pytest.raises(DifferentError):
        fed(Regeneration(record, server.dialect), replace(server, name="B", choices=choices).events(dice), dice)


@settings(max_examples=examples(75), deadline=None)
@given(server=SERVERS, dice=DICE)
def test_more_or_fewer_tokens_than_sent_are_found(server: Server, dice: random.Random) -> None:
    """The end of a choice was sent, and the second response has one more token; or it ends before the last token that was sent."""
    events = server.events(dice)
    record = noted(events[:-1], server.dialect, dice)
    index = dice.randrange(len(server.choices))
    tokens = list(server.choices[index])
    shorter = tokens[:-1]
    longer = [*tokens, Token(tokens[-1].kind, "z")]
    for other in (shorter, longer):
        if other is shorter and not (shorter and tokens[-1].text):
            continue
        choices = [other if each == index else same for each, same in enumerate(server.choices)]
        with pytest.raises(DifferentError):
            fed(Regeneration(record, server.dialect), replace(server, name="B", choices=choices).events(dice), dice)


class First(random.Random):
    """Makes groups of one token."""

    def choice(self, seq: SupportsLenAndGetItem[T]) -> T:
        return seq[0]


def chat(*tokens: Token, finish: str = "stop") -> Server:
    return Server("A", [tokens], Dialect.CHAT, finish)


def sent_by(server: Server, left_out: int) -> SentText:
    """Return the record of a stream without its last events."""
    return noted(server.events(First())[:-left_out], server.dialect, First())


def test_more_reasoning_before_a_content_that_was_sent_is_found() -> None:
    end = Token("content", "b"), Token("content", "c")
    record = sent_by(chat(Token("reasoning", "a"), *end), 3)
    other = chat(Token("reasoning", "a"), Token("reasoning", " more"), *end)
    with pytest.raises(DifferentError, match="less than was sent"):
        fed(Regeneration(record, Dialect.CHAT), other.events(First()), First())


def test_another_finish_reason_is_found() -> None:
    server = chat(Token("content", "a"))
    with pytest.raises(DifferentError, match="another structure"):
        fed(Regeneration(sent_by(server, 2), Dialect.CHAT), replace(server, finish="length").events(First()), First())


def test_only_the_missing_end_is_sent() -> None:
    server = chat(Token("content", "a"))
    rest = fed(Regeneration(sent_by(server, 2), Dialect.CHAT), server.events(First()), First())
    assert rest.count(b"data:") == 2
    assert rest.endswith(b'"choices":[],"usage":{"completion_tokens":1}}\n\n' + DONE)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"x","code":500}}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n',
        b": comment\n\n",
    ],
)
def test_failures_of_the_second_server_pass(event: bytes) -> None:
    record = sent_by(chat(Token("content", "a"), Token("content", "b")), 2)
    assert Regeneration(record, Dialect.CHAT).feed(event) == event


@pytest.mark.parametrize(
    "event",
    [
        b"data: no JSON\n\n",
        b"data: []\n\n",
        b'data: {"choices":[{"index":0,"delta":{"audio":"x"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":1},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{}},{"index":1,"delta":{}}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[1,2]}}]}\n\n',
        DONE,
    ],
)
def test_an_event_that_cannot_be_compared_is_a_difference(event: bytes) -> None:
    record = sent_by(chat(Token("content", "a")), 3)
    with pytest.raises(DifferentError):
        Regeneration(record, Dialect.CHAT).feed(event)


def test_a_choice_that_is_far_ahead_of_the_others_is_not_held_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regeneration, "HELD_LIMIT", 1000)
    server = Server("A", [[Token("content", "a")]] * 2, Dialect.CHAT)
    record = sent_by(server, 2)
    more = b'data: {"choices":[{"index":2,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % (b"x" * 500)
    one = Regeneration(record, Dialect.CHAT)
    assert one.feed(more) == b""
    with pytest.raises(DifferentError, match="ahead"):
        one.feed(more)


def chunk(**choice: Any) -> dict[str, Any]:
    return {"id": "1", "choices": [{"index": 0, "finish_reason": None, **choice}]}


@pytest.mark.parametrize(
    ("sent", "more", "rest"),
    [
        (
            {"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}},
            {"finish_reason": "tool_calls"},
            {"delta": {}},
        ),
        ({"text": "", "logprobs": {"tokens": ["a"]}}, {}, None),
        ({"text": "", "logprobs": {"tokens": ["a"]}}, {"text": "b"}, {"text": "b", "logprobs": {"tokens": []}}),
    ],
    ids=["a call", "entries", "a text after entries"],
)
def test_what_was_sent_is_left_out_of_an_event(sent: dict[str, Any], more: dict[str, Any], rest: dict[str, Any] | None) -> None:
    dialect = Dialect.CHAT if "delta" in sent else Dialect.COMPLETIONS
    record = SentText(dialect, lambda _: True)
    record.take(b"", chunk(**sent))
    found = Regeneration(record, dialect).feed(b"data: %b\n\n" % orjson.dumps(chunk(**(sent | more))))
    assert found == (b"" if rest is None else b"data: %b\n\n" % orjson.dumps(chunk(**(sent | more | rest))))


def test_without_a_record_nothing_is_continued() -> None:
    record = SentText(Dialect.CHAT, lambda _: True)
    record.drop()
    with pytest.raises(DifferentError):
        Regeneration(record, Dialect.CHAT)
