"""Streams in vLLM's shapes: the same tokens in any groups, with other random IDs for each server; and what a client sees of a stream."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import orjson

from gateway.api.routes import Dialect
from upstream.http.sse import data_of, split

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Token(NamedTuple):
    """A token of a choice. ``kind``: reasoning, content, or the number of a call. ``name``: of the function, if the token starts a call."""

    kind: str | int
    text: str
    name: str = ""


Tokens = Sequence[Token]


class Event(NamedTuple):
    """An event, and how many tokens of each choice the stream has up to it."""

    data: bytes
    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class Server:
    """Sends the same choices as every other server, in its own groups and with its own IDs."""

    name: str
    choices: Sequence[Tokens]
    dialect: Dialect
    finish: str = "stop"
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = True

    def events(self, dice: random.Random) -> list[Event]:
        """Return the events of one response, with tokens in random groups."""
        counts = dict.fromkeys(range(len(self.choices)), 0)
        make = {Dialect.MESSAGES: self._messages, Dialect.RESPONSES: self._responses}.get(self.dialect, self._chat)
        return [Event(event, dict(counts)) for event in make(counts, dice)]

    def _groups(self, counts: dict[int, int], dice: random.Random) -> Iterator[tuple[int, Tokens]]:
        """Return the tokens of all choices in random groups, the choices in random order."""
        while left := [index for index, tokens in enumerate(self.choices) if counts[index] < len(tokens)]:
            index = dice.choice(left)
            start = counts[index]
            counts[index] = min(start + dice.choice((1, 1, 2, 3, 9)), len(self.choices[index]))
            yield index, self.choices[index][start : counts[index]]

    def _id(self, kind: str, number: object = 0) -> str:
        return f"{kind}-{self.name}{number}"

    # Chat and completions

    def _chat(self, counts: dict[int, int], dice: random.Random) -> Iterator[bytes]:
        head = {"id": self._id("response"), "created": ord(self.name), "model": f"model {self.name}"}
        is_chat = self.dialect is Dialect.CHAT
        for index in range(len(self.choices) if is_chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield _data({**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]})
        for index, tokens in self._groups(counts, dice):
            choice: Json = {"index": index}
            choice |= {"delta": self._delta(index, tokens)} if is_chat else {"text": "".join(each.text for each in tokens)}
            choice |= {"logprobs": _logprobs(tokens, is_chat=is_chat) if self.logprobs else None, "finish_reason": None}
            if self.token_ids:
                choice["token_ids"] = [len(each.text) for each in tokens]
            if counts[index] == len(self.choices[index]):
                choice |= {"finish_reason": self.finish, "stop_reason": None}
            yield _data({**head, "choices": [choice], "usage": {"completion_tokens": counts[index]}})
        if self.usage:
            yield _data({**head, "choices": [], "usage": {"completion_tokens": sum(counts.values())}})
        yield DONE

    def _delta(self, index: int, tokens: Tokens) -> Json:
        delta: Json = {}
        for name in ("reasoning", "content"):
            if any(each.kind == name for each in tokens):
                delta[name] = "".join(each.text for each in tokens if each.kind == name)
        calls = []
        for number, pieces in groupby((each for each in tokens if isinstance(each.kind, int)), lambda each: each.kind):
            some = list(pieces)
            opened = {"id": self._id("call", f"{index}.{number}"), "type": "function"} if some[0].name else {}
            named = {"name": some[0].name} if some[0].name else {}
            arguments = "".join(each.text for each in some)
            calls.append({**opened, "index": number, "function": {**named, **({"arguments": arguments} if arguments else {})}})
        return delta | ({"tool_calls": calls} if calls else {})

    # Messages

    def _messages(self, counts: dict[int, int], dice: random.Random) -> Iterator[bytes]:
        message = {"id": self._id("response"), "type": "message", "content": [], "usage": {"input_tokens": 9, "output_tokens": 0}}
        yield _named({"type": "message_start", "message": message})
        index, opened = -1, None
        for _, tokens in self._groups(counts, dice):
            for kind, pieces in groupby(tokens, lambda each: each.kind):
                some = list(pieces)
                if kind != opened:
                    yield from self._stopped(opened, index)
                    opened, index = kind, index + 1
                    yield _named({"type": "content_block_start", "content_block": self._block(some[0], index), "index": index})
                text = "".join(each.text for each in some)
                if text:
                    fields = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}
                    delta, name = fields.get(str(kind), ("input_json_delta", "partial_json"))
                    yield _named({"type": "content_block_delta", "delta": {"type": delta, name: text}, "index": index})
        yield from self._stopped(opened, index)
        usage = {"input_tokens": 9, "output_tokens": counts[0]}
        yield _named({"type": "message_delta", "delta": {"stop_reason": self.finish, "stop_sequence": None}, "usage": usage})
        yield _named({"type": "message_stop"})

    def _block(self, token: Token, index: int) -> Json:
        if isinstance(token.kind, int):
            return {"type": "tool_use", "id": self._id("call", index), "name": token.name, "input": {}}
        kind = {"reasoning": "thinking", "content": "text"}[token.kind]
        return {"type": kind, kind: ""}

    def _stopped(self, kind: str | int | None, index: int) -> Iterator[bytes]:
        if kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._id("signature", index)}
            yield _named({"type": "content_block_delta", "delta": delta, "index": index})
        if kind is not None:
            yield _named({"type": "content_block_stop", "index": index})

    # Responses

    def _responses(self, counts: dict[int, int], dice: random.Random) -> Iterator[bytes]:
        return (_named({**document, "sequence_number": at}) for at, document in enumerate(self._documents(counts, dice)))

    def _documents(self, counts: dict[int, int], dice: random.Random) -> Iterator[Json]:
        response = {"id": self._id("response"), "created_at": ord(self.name), "output": [], "status": "in_progress", "usage": None}
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}
        output: list[Json] = []
        item: Json = {}
        text, opened = "", None
        for _, tokens in self._groups(counts, dice):
            for kind, pieces in groupby(tokens, lambda each: each.kind):
                some = list(pieces)
                if kind != opened:
                    yield from self._done(opened, item, text, output)
                    text, opened, item = "", kind, self._item(some[0], len(output))
                    yield {"type": "response.output_item.added", "item": dict(item), "output_index": len(output)}
                    if not isinstance(kind, int):
                        yield self._position(item, output, "content_part.added", part={"type": kind, "text": ""})
                piece = "".join(each.text for each in some)
                text += piece
                if piece:
                    yield self._position(item, output, f"{_STEMS.get(kind, 'function_call_arguments')}.delta", delta=piece)
        yield from self._done(opened, item, text, output)
        last = {**response, "output": output, "status": "completed", "usage": {"output_tokens": counts[0]}}
        yield {"type": "response.completed", "response": last}

    def _position(self, item: Json, output: list[Json], event: str, **more: Any) -> Json:
        return {"type": f"response.{event}", "item_id": item["id"], "output_index": len(output), "content_index": 0, **more}

    def _item(self, token: Token, index: int) -> Json:
        item: Json = {"id": self._id("item", index), "status": "in_progress"}
        if isinstance(token.kind, int):
            return {**item, "type": "function_call", "call_id": self._id("call", index), "name": token.name, "arguments": ""}
        return {**item, "type": token.kind, "content": []}

    def _done(self, kind: str | int | None, item: Json, text: str, output: list[Json]) -> Iterator[Json]:
        if kind is None:
            return
        stem = _STEMS.get(kind, "function_call_arguments")
        name = "text" if kind in _STEMS else "arguments"
        yield self._position(item, output, f"{stem}.done", **{name: text})
        if kind in _STEMS:
            yield self._position(item, output, "content_part.done", part={"type": kind, "text": text})
        done = {**item, "status": "completed", "arguments" if name == "arguments" else "content": text}
        yield {"type": "response.output_item.done", "item": done, "output_index": len(output)}
        output.append(done)


_STEMS: dict[str | int, str] = {"reasoning": "reasoning_text", "content": "output_text"}


def _logprobs(tokens: Tokens, *, is_chat: bool) -> Json:
    if is_chat:
        return {"content": [{"token": each.text, "logprob": -0.5} for each in tokens]}
    return {"tokens": [each.text for each in tokens], "token_logprobs": [-0.5] * len(tokens)}


def _data(document: Json) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _named(document: Json) -> bytes:
    return b"event: %b\n%b" % (str(document["type"]).encode(), _data(document))


# The view of a client


def view_of(stream: bytes, dialect: Dialect) -> Any:
    """Return all that a client sees of a stream, however its tokens are grouped. IDs are replaced by numbers in order of appearance."""
    documents = [orjson.loads(data) for data in map(data_of, split(stream)) if data.startswith(b"{")]
    seen = _choices(documents) if dialect in (Dialect.CHAT, Dialect.COMPLETIONS) else _joined(documents)
    numbers: dict[bytes, bytes] = {}
    ids = rb'"(?:response|item|call|signature)-[AB][0-9.]+"|"model [AB]"|"created_at":\d+|"6[56]"'
    real = rb'"1\d{9}"|"[a-z_-]*[0-9a-f]{16,}[0-9a-f-]*"'
    pattern = re.compile(ids + b"|" + real)
    text = pattern.sub(lambda found: numbers.setdefault(found[0], b'"#%d"' % len(numbers)), orjson.dumps(seen, option=orjson.OPT_SORT_KEYS))
    return text.decode(), stream.count(DONE)


def _choices(documents: list[Json]) -> Json:
    """Return the choices, with the texts of each joined. Everything that may come once only is in a list."""
    seen: Json = {}
    for document in documents:
        for name in ("id", "created", "model"):
            seen.setdefault(name, [])
            if str(document[name]) not in seen[name]:
                seen[name].append(str(document[name]))
        for choice in document["choices"]:
            joined = seen.setdefault(str(choice["index"]), {"text": "", "once": [], "tokens": [], "ids": [], "calls": {}})
            delta = choice.get("delta", {})
            joined["once"] += [value for value in (delta.get("role"), choice["finish_reason"]) if value is not None]
            joined["text"] += choice.get("text") or ""
            for name in ("reasoning", "content"):
                joined[name] = joined.get(name, "") + (delta.get(name) or "")
            logprobs = choice["logprobs"] or {}
            joined["tokens"] += logprobs.get("tokens") or [each["token"] for each in logprobs.get("content") or ()]
            joined["ids"] += choice.get("token_ids") or ()
            joined["completion_tokens"] = (document.get("usage") or {}).get("completion_tokens")
            for call in delta.get("tool_calls", ()):
                opened = joined["calls"].setdefault(str(call["index"]), {"once": [], "arguments": ""})
                opened["once"] += [call[name] for name in ("id", "type") if call.get(name)]
                opened["once"] += [call["function"]["name"]] if call["function"].get("name") else []
                opened["arguments"] += call["function"].get("arguments") or ""
        if not document["choices"]:
            seen.setdefault("usage", []).append(document["usage"])
    return seen


def _joined(documents: list[Json]) -> list[Json]:
    """Return the events, with neighboring pieces of a text joined."""
    numbers = [each.pop("sequence_number") for each in documents if "sequence_number" in each]
    assert numbers == list(range(len(numbers)))
    seen: list[Json] = []
    for document in documents:
        last = seen[-1] if seen else {}
        if isinstance(document.get("delta"), str) and last.get("type") == document["type"]:
            last["delta"] += document["delta"]
        elif document["type"] == last.get("type") == "content_block_delta" and document["delta"]["type"] == last["delta"]["type"]:
            assert document["index"] == last["index"]
            [name] = document["delta"].keys() - {"type"}
            last["delta"][name] += document["delta"][name]
        else:
            seen.append(document)
    return seen
