"""The running usage is read from the events of a stream, and hidden without a trace."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.usage import Usage, decode_usage_tail, usage_tail
from gateway.proxy.running_usage import RunningUsage
from tests.support.rows import each_row
from upstream.http.sse import data_of

TEXTS = st.sampled_from(
    ["a", "", '","usage":{"prompt_tokens":1,"total_tokens":1,"completion_tokens":0}}\n\n', "\\", '"', "{", "}", "\u2028", "usage"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("usage"), inner, max_size=3),
    max_leaves=8,
)
ENDS = ("", ',"completion_tokens_details":null', ',"completion_tokens_details":{"reasoning_tokens":2}')


def usage(prompt: int, completion: int, end: str = "") -> str:
    """The usage as vLLM writes it."""
    return f'"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion}{end}}}'


def read(running: RunningUsage, event: bytes) -> bytes:
    return running.read(event, orjson.loads(event.removeprefix(b"data:")))


def choice(index: int) -> str:
    return f'"choices":[{{"index":{index},"delta":{{"content":"a"}}}}]'


@given(
    before=st.dictionaries(TEXTS, JSON, max_size=3), content=JSON, after=st.dictionaries(TEXTS, JSON, max_size=2), end=st.sampled_from(ENDS)
)
def test_an_event_without_its_usage_is_what_the_server_would_have_sent(
    before: dict[str, Any], content: Any, after: dict[str, Any], end: str
) -> None:
    """The usage is cut out wherever it is, and only at its own path."""
    reserved = ("usage", "choices")
    first = {name: value for name, value in before.items() if name not in reserved}
    fields = [orjson.dumps({name: value})[1:-1].decode() for name, value in first.items()]
    fields.append(orjson.dumps({"choices": [{"index": 0, "delta": content}]})[1:-1].decode())
    last = [orjson.dumps({name: value})[1:-1].decode() for name, value in after.items() if name not in reserved and name not in first]
    expected = "data: {" + ",".join([*fields, *last]) + "}\n\n"
    sent = "data: {" + ",".join([*fields, usage(3, 2, end), *last]) + "}\n\n"
    running = RunningUsage(1, 1, hidden=True)
    assert read(running, sent.encode()) == expected.encode()
    assert running.usage == Usage(3, 2, 0, 2 if "reasoning" in end else 0) and not running.uncovered
    visible = RunningUsage(1, 1, hidden=False)
    assert read(visible, sent.encode()) == sent.encode() and visible.usage == running.usage


@each_row(
    ("sent", "expected"),
    [
        ('data: {%s, "usage" : {"prompt_tokens": 3} }\n\n', "data: {%s }\n\n"),
        ('data: {"usage":{"prompt_tokens": 3} , %s}\n\n', "data: { %s}\n\n"),
        ('data: {%s,"\\u0075sage":{"prompt_tokens":3}}\r\n\r\n', "data: {%s}\r\n\r\n"),
        ('data: {%s,"usage":null}\n\n', 'data: {%s,"usage":null}\n\n'),
    ],
)
def test_other_ways_to_write_it(sent: str, expected: str) -> None:
    written = read(RunningUsage(1, 1, hidden=True), (sent % choice(0)).encode())
    assert written == (expected % choice(0)).encode()


@each_row(
    "sent",
    [
        "data: {%s,\ndata: " + usage(3, 2) + "}\n\n",
        "data: {%s," + usage(1, 1) + "," + usage(3, 2).replace(":", " :", 1) + "}\n\n",
        'data: {%s,"usage"' + " " * 80 + ':{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}\n\n',
        ': {\ndata: {%s, "usage" : {"prompt_tokens":3,"total_tokens":5,"completion_tokens":2} }\n\n',
    ],
)
def test_an_event_that_is_written_in_another_way_is_counted_and_sent_as_it_is(sent: str) -> None:
    running, event = RunningUsage(1, 1, hidden=True), (sent % choice(0)).encode()
    assert running.read(event, orjson.loads(data_of(event))) == event
    assert running.usage == Usage(3, 2)


def events(*counts: tuple[int, int, int]) -> list[bytes]:
    return [f"data: {{{choice(index)},{usage(prompt, completion)}}}\n\n".encode() for index, prompt, completion in counts]


@each_row(
    ("choices", "prompts", "counts", "total"),
    [
        (1, 1, [(0, 9, 0), (0, 9, 3)], Usage(9, 3)),
        (3, 1, [(0, 9, 2), (1, 9, 5), (0, 9, 4)], Usage(9, 9)),
        (1, 2, [(0, 9, 2), (1, 7, 5)], Usage(16, 7)),
        (2, 2, [(0, 9, 1), (1, 9, 2), (2, 7, 3), (3, 7, 4)], Usage(16, 10)),
        (2, 2, [(3, 7, 4)], Usage(7, 4)),
    ],
)
def test_the_tokens_of_all_choices_and_prompts_are_added(
    choices: int, prompts: int, counts: list[tuple[int, int, int]], total: Usage
) -> None:
    running = RunningUsage(choices, prompts, hidden=True)
    for event in events(*counts):
        read(running, event)
    assert running.usage == total and running.is_simple is (choices == prompts == 1)
    assert decode_usage_tail(running.latest_tail()) == total


def test_an_event_without_counts_is_not_covered() -> None:
    running = RunningUsage(1, 1, hidden=True)
    assert running.latest_tail() == b""
    for event in (*events((0, 9, 2)), f"data: {{{choice(0)}}}\n\n".encode()):
        read(running, event)
    assert running.usage == Usage(9, 2) and running.uncovered and running.latest_tail() == b""


def test_the_final_usage_is_not_a_running_one() -> None:
    running = RunningUsage(1, 1, hidden=True)
    final = f'data: {{"choices":[],{usage(9, 2)}}}\n\n'.encode()
    assert read(running, final) == final and running.usage is None and not running.uncovered


@given(st.builds(Usage, *(st.integers(0, 2**40) for _ in range(4))))
def test_a_usage_tail_is_read_as_it_was_written(written: Usage) -> None:
    assert decode_usage_tail(usage_tail(written)) == written
    assert decode_usage_tail(usage_tail(written) + b"}\n\n\r\n") == written
