"""A chat that is continued by its token IDs is like an undisturbed one: for any cut, any groups of tokens and any parser. Without I/O.

The rule: the other server checks what it gets. It continues only the first tokens of its response, and derenders only those that follow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.routes import Dialect
from gateway.continuation.chat import ContinuedChat
from gateway.continuation.events import DONE, closing, event, usage_of
from gateway.continuation.token_record import TokenRecord
from tests.gateway.continuation.streams import Tokens, view_of
from tests.gateway.continuation.test_regeneration import DICE, token_lists
from tests.support.examples import examples
from upstream.http.sse import Splitter, data_of, split

Json = dict[str, Any]
PROMPT, FIRST, LIMIT = [1, 2, 3], 1000, 1 << 16
MARK = "mark"


class Piece(NamedTuple):
    """A token. ``kind``: as in ``streams.Token``, or a mark, which has no text. ``text`` may be a part of a character."""

    kind: str | int
    text: bytes = b""
    name: str = ""


class Shown(NamedTuple):
    """The parts of a chat that a client was shown. ``calls``: names and arguments."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Engine:
    """Makes one response. ``lag``: the tokens that its parser reads ahead. ``stop``: the stop token, if the request has named it."""

    pieces: Sequence[Piece]
    finish: str
    stop: int | None
    lag: int
    thinks: bool
    calls: bool

    @property
    def ids(self) -> list[int]:
        return [FIRST + number for number in range(len(self.pieces))]

    @property
    def request(self) -> Json:
        limits = {"max_tokens": len(self.pieces) + (self.finish != "length"), "min_tokens": 3}
        return {**limits, "tools": [{}]} if self.calls else limits

    def usage(self, count: int) -> Json:
        """Return the usage after ``count`` tokens. The tokens of the reasoning are those before the first mark."""
        reasoning = next((at for at, piece in enumerate(self.pieces[:count]) if piece.kind == MARK), count)
        return usage_of(len(PROMPT), count, reasoning if self.thinks else None)

    def groups(self, start: int, dice: random.Random) -> Iterator[tuple[int, int, str | None]]:
        """Return the rest of the tokens in random groups: the first and the last number, and the finish reason."""
        while start < len(self.pieces):
            end = min(start + dice.choice((1, 1, 2, 3, 9)), len(self.pieces))
            yield start, end, self.finish if end == len(self.pieces) else None
            start = end

    def _start(self, prompt: list[int], most: int, least: int) -> int:
        """Return how many tokens of the response a prompt has. The limits must be those for the rest."""
        start = len(prompt) - len(PROMPT)
        assert prompt == PROMPT + self.ids[:start]
        assert (most, least) == (self.request["max_tokens"] - start, max(self.request["min_tokens"] - start, 0))
        return start

    def chat(self, dice: random.Random) -> bytes:
        """Return the stream of a chat."""
        head = _head("A")
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        made = event({**head, "choices": [role], "prompt_token_ids": PROMPT, "usage": self.usage(0)})
        for first, last, finish in self.groups(0, dice):
            before, after = self.shown(first), self.shown(last, finished=finish is not None)
            delta, finish = _delta(before, after, "A"), "tool_calls" if finish == "stop" and after.calls else finish
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": self.ids[first:last]}
            made += event({**head, "choices": [choice], "usage": self.usage(last)})
        return made + closing(head, self.usage(len(self.pieces)))

    def shown(self, count: int, *, finished: bool = False) -> Shown:
        """Return what a client has been shown after ``count`` tokens."""
        pieces = self.pieces[: count if finished else max(count - self.lag, 0)]
        calls: dict[int, tuple[str, list[bytes]]] = {}
        for piece in pieces:
            if isinstance(piece.kind, int):
                calls.setdefault(piece.kind, (piece.name, []))[1].append(piece.text)
        reasoning = _decoded(piece.text for piece in self.pieces[:count] if piece.kind == "reasoning")
        content = _decoded(piece.text for piece in pieces if piece.kind == "content")
        return Shown(reasoning, content, [(name, _decoded(texts)) for name, texts in calls.values()])

    def generated(self, body: Json, dice: random.Random) -> bytes:
        """Return the stream of ``generate``."""
        params, made = body["sampling_params"], b""
        for first, last, finish in self.groups(self._start(body["token_ids"], params["max_tokens"], params["min_tokens"]), dice):
            choice = {"token_ids": self.ids[first:last], "finish_reason": finish, "stop_reason": self.stop if finish else None}
            made += event({"request_id": "r", "choices": [{"index": 0, **choice}]})
        return made + DONE

    def derendered(self, body: Json) -> bytes:
        """Return the response of ``derender``."""
        state, [choice] = body["stream_state"], body["generate_chunk"]["choices"]
        known, ids, finish = state["output_token_ids"], choice["token_ids"], choice["finish_reason"]
        assert len(ids) < 2 or not self.calls, "some parsers lose text of several tokens"
        assert known + ids == self.ids[: len(known) + len(ids)] and sum(state["output_chunk_lens"]) == len(known)
        before, after = self.shown(len(known)), self.shown(len(known) + len(ids), finished=finish is not None)
        assert len(state["last_tool_call_ids"]) == len(before.calls) and state["tools_streamed"] is bool(before.calls)
        delta = _delta(before, after, "B")
        calls = [call["id"] for call in delta.get("tool_calls", ()) if call.get("id")]
        changes = {
            "output_token_ids": known + ids,
            "output_chunk_lens": state["output_chunk_lens"] + ([len(ids)] if ids else []),
            "tools_streamed": bool(after.calls),
            "last_tool_call_ids": state["last_tool_call_ids"] + calls,
        }
        shown = {**choice, "delta": {"role": None, **delta}, "finish_reason": "tool_calls" if finish == "stop" and after.calls else finish}
        return orjson.dumps({"chunk": {"choices": [shown]}, "stream_state": {**state, **changes}})


def _head(name: str) -> Json:
    return {"id": f"response-{name}0", "object": "any", "created": ord(name), "model": f"model {name}"}


def _decoded(texts: Iterator[bytes] | Sequence[bytes]) -> str:
    """Return the characters that are complete."""
    return b"".join(texts).decode(errors="ignore")


def _delta(before: Shown, after: Shown, server: str) -> Json:
    delta: Json = {}
    for name in ("reasoning", "content"):
        if new := getattr(after, name)[len(getattr(before, name)) :]:
            delta[name] = new
    calls = []
    for number, (name, arguments) in enumerate(after.calls):
        is_new = number >= len(before.calls)
        opened = {"id": f"call-{server}{number}", "type": "function"} if is_new else {}
        new = arguments if is_new else arguments[len(before.calls[number][1]) :]
        if is_new or new:
            function = {**({"name": name} if is_new else {}), **({"arguments": new} if new else {})}
            calls.append({"index": number, **opened, "function": function})
    return delta | ({"tool_calls": calls} if calls else {})


# The gateway


def _taken(record: TokenRecord, stream: bytes, dice: random.Random) -> bytes:
    """Record events, and return what the client gets. Some events with only a text are recorded as the fast path records them."""
    shown = b""
    for one in split(stream):
        data = data_of(one)
        document = orjson.loads(data) if data.startswith(b"{") else {}
        [choice] = document.get("choices") or [{}]
        delta, ids = choice.get("delta", {}), choice.get("token_ids")
        is_ordinary = {"content", "reasoning"} & delta.keys() and "tool_calls" not in delta and choice["finish_reason"] is None
        if record.has_begun and is_ordinary and ids and dice.random() < 0.5:
            record.add_hidden(",".join(map(str, ids)).encode())
            choice["token_ids"] = None
            shown += event(document)
        else:
            shown += record.take(one, document)
    return shown


def _rest(engine: Engine, record: TokenRecord, sent: bytes, dice: random.Random) -> Iterator[bytes]:
    """Return the rest of a chat, in pieces between which the server may be lost."""
    usage = orjson.loads(data_of(split(sent)[-1]))["usage"]
    reasoning, counted = usage.get("completion_tokens_details", {}).get("reasoning_tokens"), usage["completion_tokens"]
    request = {**engine.request, "stream": True, "messages": []}
    rest = ContinuedChat(record, request, reasoning=reasoning, counted=counted, running=True, limit=LIMIT)
    assert "stream" not in orjson.loads(rest.render_body("m"))
    rendered = {"token_ids": PROMPT, "sampling_params": {"n": 1, **engine.request}}
    stream = engine.generated(orjson.loads(rest.generate_body(orjson.dumps(rendered), "m")), dice)
    while not rest.has_ended:
        size = dice.randrange(1, 300)
        rest.feed(stream[:size])
        stream = stream[size:]
        while rest.has_tokens:
            yield rest.events(engine.derendered(orjson.loads(rest.derender_body("m"))))


def continued(engine: Engine, stream: bytes, cuts: int, dice: random.Random) -> bytes:
    """Return what the client gets of a stream that is cut at a random byte, and its continuations as well."""
    record = TokenRecord(Dialect.CHAT, lambda _: True)
    first = len(split(stream)[0])
    shown = _taken(record, Splitter(len(stream)).feed(stream[: dice.randrange(first, len(stream))]), dice)
    for left in reversed(range(cuts)):
        if shown.endswith(DONE):
            return shown
        if record.finish is not None:
            return shown + closing(record.head, None if record.usage_sent else engine.usage(len(record.ids)))
        for piece in _rest(engine, record, shown, dice):
            shown += _taken(record, piece, dice)
            if left and dice.random() < 0.1:
                break
    return shown


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    thinks = draw(st.booleans())
    finish = draw(st.sampled_from(("stop", "length")))
    stop = draw(st.sampled_from((None, 7))) if finish == "stop" else None
    tokens = draw(token_lists(Dialect.CHAT))
    pieces = [Piece(MARK)] if thinks and tokens[0].kind != "reasoning" else []
    pieces += _pieces(tokens, draw(DICE))
    pieces += [Piece(MARK)] if finish == "stop" and stop is None else []
    calls = any(isinstance(token.kind, int) for token in tokens)
    return Engine(pieces, finish, stop, draw(st.integers(0, 3)), thinks, calls)


def _pieces(tokens: Tokens, dice: random.Random) -> list[Piece]:
    """Cut the texts into tokens at random bytes. Between two kinds of text are marks."""
    pieces: list[Piece] = []
    for number, token in enumerate(tokens):
        if number and token.kind != tokens[number - 1].kind:
            pieces += [Piece(MARK)] * dice.choice((1, 1, 2))
        text = token.text.encode()
        at = sorted({0, len(text), *(dice.randrange(len(text) + 1) for _ in range(2))})
        pieces += [Piece(token.kind, text[start:end]) for start, end in pairwise(at)] or [Piece(token.kind, b"", token.name)]
    return pieces


def view(stream: bytes, *, reasoning: bool) -> object:
    if not reasoning:
        stream = b"".join(_without_details(one) for one in split(stream))
    return view_of(stream, Dialect.CHAT)


def _without_details(one: bytes) -> bytes:
    if one == DONE:
        return one
    document = orjson.loads(data_of(one))
    if isinstance(document.get("usage"), dict):
        document["usage"].pop("completion_tokens_details", None)
    return event(document)


@settings(max_examples=examples(300), deadline=None)
@given(engine=engines(), cuts=st.integers(1, 3), dice=DICE)
def test_a_continued_stream_is_like_an_undisturbed_one(engine: Engine, cuts: int, dice: random.Random) -> None:
    """The tokens of the reasoning are exact after one cut, unless a reasoning ends with white space, which a parser may drop."""
    stream = engine.chat(dice)
    undisturbed = _taken(TokenRecord(Dialect.CHAT, lambda _: True), stream, dice)
    exact = cuts == 1 and not engine.shown(len(engine.pieces)).reasoning[-1:].isspace()
    assert view(continued(engine, stream, cuts, dice), reasoning=exact) == view(undisturbed, reasoning=exact)
