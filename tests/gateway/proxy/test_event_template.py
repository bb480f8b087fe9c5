"""A template describes ordinary events byte by byte, apart from their text and the numbers behind it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.routes import Dialect
from gateway.proxy.event_template import NO_TEMPLATE, TEXT, EventTemplate, TemplateLearner
from tests.support.examples import examples
from upstream.http.sse import data_of

CHAT = '{"id":"1","choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}'
USAGE = ',"usage":{"prompt_tokens":9,"total_tokens":%d,"completion_tokens":%d}'
RESPONSES = '{"content_index":0,"delta":%s,"item_id":"msg_1","output_index":0,"sequence_number":%d,"type":"response.output_text.delta"}'
MESSAGES = '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%s}}'


def event(document: str) -> bytes:
    return f"data: {document}\n\n".encode()


def learned(sent: bytes, dialect: Dialect = Dialect.CHAT, shown: bytes | None = None) -> EventTemplate:
    learner = TemplateLearner(dialect)
    learner.learn(sent, orjson.loads(data_of(sent)), sent if shown is None else shown)
    return learner.template


def describes(template: EventTemplate, sent: bytes) -> bool:
    """Return whether a template describes an event, as the fast path decides it."""
    text = TEXT.match(sent, template.start_size)
    if not sent.startswith(template.start) or text is None:
        return False
    quote, framed = text.end() - 1, sent + b"\r\n"
    behind = quote + template.end_size
    if not framed.startswith(template.end, quote):
        return False
    return behind == len(framed) if template.numbers is None else template.numbers.fullmatch(framed, behind) is not None


@pytest.mark.parametrize("text", ["b", "", " then", '"', "\\", "\n", "usage", '","usage":{}', "\u00e4" * 50, "{}[]"])
def test_another_text_has_the_same_template(text: str) -> None:
    assert describes(learned(event(CHAT % '"a"')), event(CHAT % orjson.dumps(text).decode()))


@pytest.mark.parametrize(
    "other",
    [
        (CHAT % '"a"').replace("null", '"stop"'),
        (CHAT % '"a"').replace("null", '"abort"'),
        (CHAT % '"a"').replace("null", "1"),
        (CHAT % '"a"').replace('"id":"1"', '"id":"1","error":{}'),
        (CHAT % '"a"').replace('"index":0', '"index":1'),
        (CHAT % '"a"')[:-1] + ',"usage":{"prompt_tokens":1}}',
        (CHAT % '"a"')[:-1] + ',"x":1}',
        CHAT % '"a","role":"b"',
        CHAT % '"a\\u0022"',
        CHAT % '"a\tb"',
        '{"id":"1","choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3}}',
    ],
)
def test_an_event_with_another_field_or_value_has_not(other: str) -> None:
    assert not describes(learned(event(CHAT % '"a"')), event(other))


def test_numbers_behind_the_text_may_differ() -> None:
    template = learned(event(RESPONSES % ('"a"', 9)), Dialect.RESPONSES)
    assert describes(template, event(RESPONSES % ('" the"', 1234567)))
    for other in (
        RESPONSES % ('"a"', -1),
        (RESPONSES % ('"a"', 10)).replace("text.delta", "text.done"),
        RESPONSES.replace("%d", "01") % '"a"',
    ):
        assert not describes(template, event(other))


def test_the_number_of_a_block_behind_the_text_may_not_differ() -> None:
    document = '{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"},"index":%d}'
    template = learned(event(document % 1), Dialect.MESSAGES)
    assert describes(template, event(document % 1))
    assert not describes(template, event(document % 2))


def test_the_hidden_usage_is_the_last_field() -> None:
    shown = event(CHAT % '"a"')
    sent = event((CHAT % '"a"')[:-1] + USAGE % (12, 3) + "}")
    template = learned(sent, shown=shown)
    assert sent[template.start_size + 1 + template.hidden :].startswith(b',"usage":{"prompt_tokens":9')
    assert describes(template, event((CHAT % '" the"')[:-1] + USAGE % (1200, 1191) + "}"))
    for end in (USAGE % (12, 3) + ',"x":1}', "}", (USAGE % (12, 3))[:-1] + ',"x":null}}', (USAGE % (12, 3)).replace("9", "null") + "}"):
        assert not describes(template, event((CHAT % '"a"')[:-1] + end))


@pytest.mark.parametrize(
    ("dialect", "document"),
    [
        (Dialect.CHAT, '{"choices":[{"delta":{"role":"assistant"}}]}'),
        (Dialect.CHAT, '{"choices":[{"delta":{"content":""}}]}'),
        (Dialect.CHAT, '{"choices":[{"delta":{"content":"a"}},{"delta":{"content":"b"}}]}'),
        (Dialect.CHAT, '{"delta":{"content":"a"}}'),
        (Dialect.MESSAGES, '{"delta":{"type":"signature_delta","signature":"a"}}'),
        (Dialect.COMPLETIONS, CHAT % '"a"'),
        (Dialect.CHAT, '{"choices":[{"delta":{"content":"\\u0061"}}]}'),
    ],
)
def test_an_event_without_a_text_has_no_template(dialect: Dialect, document: str) -> None:
    assert learned(event(document), dialect) == NO_TEMPLATE


@pytest.mark.parametrize(
    ("dialect", "document"),
    [
        (Dialect.CHAT, '{"choices":[{"delta":{"content":%s}}]}'),
        (Dialect.CHAT, '{"choices":[{"delta":{"reasoning":%s}}]}'),
        (Dialect.CHAT, '{"choices":[{"delta":{"reasoning_content":%s}}]}'),
        (Dialect.CHAT, '{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":%s}}]}}]}'),
        (Dialect.COMPLETIONS, '{"choices":[{"index":0,"text":%s,"finish_reason":null}]}'),
        (Dialect.RESPONSES, '{"delta":%s,"item_id":"a"}'),
        (Dialect.MESSAGES, MESSAGES),
        (Dialect.MESSAGES, '{"delta":{"type":"thinking_delta","thinking":%s}}'),
        (Dialect.MESSAGES, '{"delta":{"type":"input_json_delta","partial_json":%s}}'),
        (Dialect.PLAIN, '{"choices":[{"delta":{"content":%s}}]}'),
    ],
)
def test_the_positions_of_a_text(dialect: Dialect, document: str) -> None:
    template = learned(event(document % '"a"'), dialect)
    assert describes(template, event(document % '" the"')) and not describes(template, event(document % "1"))


SENT, SHOWN = event((CHAT % '"a"')[:-1] + USAGE % (12, 3) + "}"), event(CHAT % '"a"')


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (event(CHAT % '"\\u0001"'), None),  # code units that a text is not matched with
        (event(CHAT % '"a"').replace(b"}\n\n", b"} \n\n"), None),
        (event(CHAT % '"a"').replace(b"\n\n", b"\r\n\r\n"), None),
        (event(CHAT % '"a"').replace(b'"delta":', b'"delta":\ndata: '), None),  # two lines of one document
        (b": {\n" + event(CHAT % '"a"'), None),
        (event(CHAT % '"1"'), None),  # the ID is the same text, and the first one
        (SENT, SHOWN[:-3] + b"}\r\n"),
        (SENT, SHOWN.replace(b'"index":0', b'"index":1')),
        (SENT, SHOWN.replace(b'"index"', b'"x":1,"index"')),
        (SENT, event("{}")),  # ends before the text
        (event((CHAT % '"a"')[:-1] + ',"x":1}'), SHOWN),  # another field is left out
        (
            event((CHAT % '"a"')[:-1] + ',"x":1' + USAGE % (12, 3) + "}"),
            event((CHAT % '"a"')[:-1] + ',"x":1}'),
        ),  # a number before the usage
    ],
)
def test_an_event_that_is_written_or_shown_in_another_way_has_no_template(sent: bytes, shown: bytes | None) -> None:
    assert learned(sent, shown=shown) is NO_TEMPLATE


def test_the_parts_of_a_template() -> None:
    start, end = b'data: {"delta":{"text":"', b'"}}\n\n\r\n'
    assert learned(event('{"delta":{"text":"a"}}'), Dialect.MESSAGES) == EventTemplate(start, end, None, -1, len(start), len(end))
    start, end = b'data: {"delta":{"text":"', b'"},"x":'
    template = learned(event('{"delta":{"text":"ab"},"x":1,"y":20}'), Dialect.MESSAGES)
    assert template == EventTemplate(start, end, template.numbers, -1, len(start), len(end))
    numbers = template.numbers
    assert numbers is not None and numbers.fullmatch(b'70,"y":0}\n\n\r\n') and not numbers.fullmatch(b'70,"z":0}\n\n\r\n')
    hidden = learned(SENT, shown=SHOWN).hidden
    assert SENT[SENT.find(b'"},"finish') + hidden :].startswith(b',"usage":')


def test_eight_events_of_a_stream_make_templates() -> None:
    """An event without a text does not count, and an event without a template keeps the last one."""
    learner = TemplateLearner(Dialect.MESSAGES)

    def learn(text: str, ending: bytes = b"") -> bytes:
        document = {"x": text, "delta": {"text": f"a{text}"}}
        sent = b"data: " + orjson.dumps(document) + ending + b"\n\n"
        learner.learn(sent, document, sent)
        return sent

    first = learn("0")
    assert describes(learner.template, first)
    learner.learn(event("{}"), {}, event("{}"))
    learn("1", b" ")
    assert describes(learner.template, first)
    for number in range(2, 8):
        sent = learn(str(number))
        assert describes(learner.template, sent)
    last = learn("8")
    assert not describes(learner.template, last) and describes(learner.template, sent)
    learner.forget()
    assert learner.template is NO_TEMPLATE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.sampled_from(["a", "b", '"', "content"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "content", "delta"]), inner, max_size=2),
    max_leaves=5,
)
EXTRA = st.dictionaries(st.sampled_from(["x", "y", "usage", "error", "id"]), JSON, max_size=3)


@settings(max_examples=examples(300), deadline=None)
@given(before=EXTRA, after=EXTRA, other_before=EXTRA, other_after=EXTRA, texts=st.tuples(st.text(max_size=5), st.text(max_size=5)))
def test_what_a_template_describes_has_the_same_fields(
    before: dict[str, Any], after: dict[str, Any], other_before: dict[str, Any], other_after: dict[str, Any], texts: tuple[str, str]
) -> None:
    """Apart from the text, and from numbers behind it."""

    def made(first: dict[str, Any], text: str, last: dict[str, Any]) -> dict[str, Any]:
        return {**first, "choices": [{"index": 0, "delta": {"content": text}}], **{name: last[name] for name in last if name not in first}}

    one, other = made(before, texts[0] or "a", after), made(other_before, texts[1], other_after)
    template = learned(b"data: " + orjson.dumps(one) + b"\n\n")
    if template is not NO_TEMPLATE and describes(template, b"data: " + orjson.dumps(other) + b"\n\n"):
        assert _without_numbers(made(before, "", after)) == _without_numbers(made(other_before, "", other_after))


def _without_numbers(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _without_numbers(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_without_numbers(value) for value in node]
    return 0 if type(node) is int else node
