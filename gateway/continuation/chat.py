"""Continue a chat on another server: render its prompt, generate tokens after those of the response so far, derender them. Sans-I/O.

The rule: derender gets every token of the response in turn, except the token that ended the response, and the events that it makes are
those of the parsers of the lost server (docs/continuation.md, "Rules of an exact continuation").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from gateway.continuation.completion import remaining
from gateway.continuation.events import closing, event, usage_of
from gateway.continuation.token_record import TokenRecord
from upstream.http.sse import Splitter, data_of, split

CHAT = "/v1/chat/completions"
RENDER, GENERATE, DERENDER = f"{CHAT}/render", "/inference/v1/generate", f"{CHAT}/derender"


class InvalidReplyError(Exception):
    """A route for token IDs has not responded as expected."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Generated(msgspec.Struct):
    """An event of ``generate``."""

    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


class _Derendered(msgspec.Struct):
    """A response of ``derender``."""

    chunk: dict[str, Any]
    stream_state: dict[str, Any]


_decode_generated = msgspec.json.Decoder(_Generated).decode
_decode_derendered = msgspec.json.Decoder(_Derendered).decode


class _Search:
    """Finds the token with which a reasoning ended, in the last group of tokens that had a text of it.

    A parser shows the text of the group alone, and vLLM counts the tokens up to the mark that ends the reasoning.
    """

    def __init__(self, state: dict[str, Any], group: list[int], text: str) -> None:
        self.state = state
        self._group = group
        self._text = text
        self.least, self._most = 1, len(group)

    @property
    def is_found(self) -> bool:
        """Whether the tokens before the end of the reasoning are known: ``least``."""
        return self.least >= self._most

    @property
    def surplus(self) -> int:
        """The tokens of the group that are not part of the reasoning."""
        return len(self._group) - self.least

    @property
    def tokens(self) -> list[int]:
        """The tokens to derender next."""
        return self._group[: (self.least + self._most) // 2]

    def narrow(self, text: object) -> None:
        """Note the text of these tokens."""
        middle = (self.least + self._most) // 2
        if isinstance(text, str) and text.rstrip() == self._text.rstrip():  # a parser may drop the last space once the mark follows
            self._most = middle
        else:
            self.least = middle + 1


class ContinuedChat:
    """The rest of one chat.

    ``document`` is the request as its server got it. ``reasoning``: the tokens of the reasoning among the first ``counted`` tokens; None
    for a server without a reasoning parser. ``running``: each event has its usage. ``limit``: bytes of an incomplete event that may be
    held.
    """

    def __init__(
        self, record: TokenRecord, document: Mapping[str, Any], *, reasoning: int | None, counted: int, running: bool, limit: int
    ) -> None:
        self._record = record
        self._request = {name: value for name, value in document.items() if name not in ("stream", "stream_options")}
        self._document = document
        self._reasoning = reasoning
        self._running = running
        self._has_tools = bool(document.get("tools")) and document.get("tool_choice") != "none"
        self._splitter = Splitter(limit)
        self._prompt: list[int] = []
        self._made = len(record.ids)
        self._state: dict[str, Any] = {
            "output_token_ids": list(record.ids),
            "output_chunk_lens": list(record.lengths),
            "role_sent": record.has_begun,
            "tools_streamed": record.tools_sent,
            "last_tool_call_ids": list(record.call_ids),
        }
        self._pending: list[int] = []
        self._group: list[int] = []
        self._unsure = self._made - counted  # tokens without a text since the last one of the reasoning
        self._thought: _Search | None = None  # the last group with a text of the reasoning
        self._held: _Derendered | None = None  # what was derendered when the reasoning ended, until its end is found
        self._last = _Choice()
        self.has_ended = False
        """Whether the last event was made."""
        self.failure: dict[str, Any] | None = None
        """An error event of the server."""

    def render_body(self, model: str) -> bytes:
        """Return the request to ``render``."""
        return orjson.dumps({**self._request, "model": model})

    def generate_body(self, rendered: bytes, model: str) -> bytes:
        """Return the request to ``generate`` for a response of ``render``. Raises InvalidReplyError."""
        try:
            request = orjson.loads(rendered)
            self._prompt = [int(each) for each in request["token_ids"]]
            params = {**request["sampling_params"]}
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
            raise InvalidReplyError(f"render: {type(error).__name__}") from error
        if self._record.prompt_size and len(self._prompt) != self._record.prompt_size:
            raise InvalidReplyError("render has made another prompt")
        params.pop("n", None)
        request |= {
            "model": model,
            "token_ids": [*self._prompt, *self._record.ids],
            "sampling_params": {**params, **remaining({"min_tokens": self._document.get("min_tokens"), **params}, self._made)},
            "reasoning_ended": None,
            "stream": True,
        }
        return orjson.dumps(request)

    def feed(self, data: bytes) -> None:
        """Read bytes of the stream of ``generate``. Raises EventTooLongError, and InvalidReplyError for an event of another shape."""
        for received in split(self._splitter.feed(data)):
            text = data_of(received)
            if not text.startswith(b"{"):
                continue
            try:
                found = _decode_generated(text)
            except msgspec.DecodeError as error:
                raise InvalidReplyError("generate: an event of another shape") from error
            self.failure = found.error or self.failure
            for choice in found.choices:
                self._pending += choice.token_ids or ()
                self._last = choice if choice.finish_reason is not None else self._last

    @property
    def finish(self) -> str | None:
        """The finish reason, once ``generate`` has ended."""
        return self._last.finish_reason

    @property
    def has_tokens(self) -> bool:
        """Whether there is something to derender."""
        return not self.has_ended and (bool(self._pending) or self.finish is not None or self._held is not None)

    def derender_body(self, model: str) -> bytes:
        """Return the request to ``derender`` for the tokens since the last one, or for the next token if calls are possible.

        Some parsers lose text of several tokens. The last token is left out if it ended the response: with only a tool parser, vLLM would
        show its text.
        """
        state, ids, last = self._state, list[int](), _Choice()
        if self._held is None:
            count = 1 if self._has_tools else len(self._pending)
            self._group, self._pending = self._pending[:count], self._pending[count:]
            last = last if self._pending else self._last
            ids = self._group[:-1] if last.finish_reason == "stop" and last.stop_reason is None else self._group
        elif self._thought is not None:
            state, ids = self._thought.state, self._thought.tokens
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        return orjson.dumps(
            {
                "stream": True,
                "model": model,
                "generate_chunk": {"request_id": "continued", "choices": [choice]},
                "stream_state": state,
                "prompt_token_ids": self._prompt,
                "chat_request": {**self._request, "model": model},
            }
        )

    def events(self, derendered: bytes) -> bytes:
        """Return the events for a response of ``derender``; none while the end of the reasoning is looked for. Raises InvalidReplyError."""
        try:
            reply = _decode_derendered(derendered)
            [choice] = reply.chunk["choices"]
            delta = _without_nulls(choice["delta"])
            finish = choice["finish_reason"]
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InvalidReplyError(f"derender: {type(error).__name__}") from error
        if self._held is not None and self._thought is not None:
            self._thought.narrow(delta.get("reasoning"))
            reply = self._held
        elif self._reasoning is not None:
            self._count(delta)
        if self._reasoning is not None and self._thought is not None and (self._held or finish is not None or delta.keys() - _THOUGHT):
            if not self._thought.is_found:
                self._held = reply
                return b""
            self._reasoning -= self._thought.surplus
            self._thought = self._held = None
        return self._made_of(reply)

    def _count(self, delta: Mapping[str, Any]) -> None:
        """Count the tokens of the reasoning. Those without a text belong to it if more of it follows."""
        assert self._reasoning is not None
        if "reasoning" in delta:
            self._reasoning += self._unsure + len(self._group)
            self._unsure = 0
            self._thought = _Search(self._state, self._group, delta["reasoning"])
        else:
            self._unsure += len(self._group)

    def _made_of(self, reply: _Derendered) -> bytes:
        """Return the events for a group of tokens."""
        [choice] = reply.chunk["choices"]
        group = self._group
        self._state, self._made = reply.stream_state, self._made + len(group)
        self.has_ended = self.finish is not None and not self._pending
        shown: dict[str, Any] = {
            "index": 0,
            "delta": _without_nulls(choice["delta"]),
            "logprobs": None,
            "finish_reason": choice["finish_reason"],
        }
        if self.has_ended:
            shown["stop_reason"] = choice.get("stop_reason")
        usage = usage_of(len(self._prompt), self._made, self._reasoning)
        running = {"usage": usage} if self._running else {}
        made = event({**self._record.head, "choices": [{**shown, "token_ids": group}], **running})
        return made + closing(self._record.head, usage) if self.has_ended else made


_THOUGHT = frozenset({"role", "reasoning"})
"""The fields of an event while a chat reasons."""


def _without_nulls(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in delta.items() if value is not None and value != []}
