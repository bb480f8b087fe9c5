"""Translates requests in forms that vLLM does not support, and their responses back. Pure.

There are three: a raw ``prompt`` on the chat route (served by /v1/completions, returned in chat's shape), the deprecated
``functions``/``function_call`` (now tools), and ``developer`` messages, which few chat templates support. The rule: a request in none of
these forms is not changed, and its response's bytes are not changed either.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice, takewhile
from typing import Any, Protocol

from gateway.api.errors import Refusal, invalid_value

Document = dict[str, Any]
_MESSAGES_PER_STEP = 2_000
_MESSAGES_SCANNED = 10_000  # in one step
_OLD_ROLES = ("developer", "function")  # not a set: a client may send a value without a hash


class Translation(Protocol):
    """Translates the response to one request back. It may store what it has seen of a stream."""

    def response(self, document: Document) -> Document:
        """Translate a whole response."""

    def chunk(self, document: Document) -> list[Document]:
        """Translate one chunk of a stream into the chunks that the client gets."""


Translated = tuple[Document, str | None, Translation | None]


def translate(document: Document, *, large: bool) -> Generator[None, None, Translated]:
    """Translate a chat request: returns the body, another path at the server if needed, and the response's translation.

    ``large``: the messages are scanned in steps. Raises Refusal if both or neither of ``messages`` and ``prompt`` are given, and for
    functions together with tools.
    """
    messages = document.get("messages")
    if "prompt" in document and document["prompt"] is not None:
        if messages is not None:
            raise invalid_value("Only one of 'messages' and 'prompt' can be given.", param="prompt")
        return _completion(document), "/v1/completions", RawPrompt()
    if messages is None:
        raise Refusal("missing_required_parameter", "One of 'messages' and 'prompt' must be given.", param="messages")
    developer = functions = False
    parts = [messages] if type(messages) is list else []
    if large and parts:
        parts = [messages[start : start + _MESSAGES_SCANNED] for start in range(0, len(messages), _MESSAGES_SCANNED)]
    for some in parts:
        if large:
            yield
        for message in some:
            if type(message) is dict and ("function_call" in message or message.get("role") in _OLD_ROLES):
                developer = developer or message.get("role") == "developer"
                functions = functions or message.get("role") == "function" or bool(message.get("function_call"))
    if developer:
        yield
        document = {**document, "messages": (yield from _collect(_as_system(messages)))}
    if functions or ("functions" in document and document["functions"] is not None):
        yield
        body, translation = _tools(document), None if document.get("functions") is None else Functions()
        if isinstance(body["messages"], list):
            body["messages"] = yield from _collect(_with_tool_calls(body["messages"]))
        return body, None, translation
    return document, None, None


def _collect(messages: Iterator[Any]) -> Generator[None, None, list[Any]]:
    """Collect translated messages, some of them in each step."""
    collected: list[Any] = []
    while some := list(islice(messages, _MESSAGES_PER_STEP)):
        collected += some
        yield
    return collected


# A raw prompt


def _completion(document: Document) -> Document:
    """Return the body for /v1/completions. Two settings have other names there, and null is not always accepted as absent."""
    if not isinstance(document["prompt"], str):
        raise invalid_value("The field 'prompt' must be a string.", param="prompt")
    others = ("messages", "max_completion_tokens", "logprobs", "top_logprobs")
    body = {name: value for name, value in document.items() if value is not None and name not in others}
    if (limit := document.get("max_completion_tokens")) is not None:
        body["max_tokens"] = limit
    if document.get("logprobs"):
        body["logprobs"] = document.get("top_logprobs") or 0
    return body


class RawPrompt:
    """Translates responses of completions to chat."""

    def __init__(self) -> None:
        self._started: set[int] = set()

    def response(self, document: Document) -> Document:
        return {**document, "object": "chat.completion", "choices": [_message_of(choice) for choice in document.get("choices", ())]}

    def chunk(self, document: Document) -> list[Document]:
        chunk = {**document, "object": "chat.completion.chunk"}
        choices = document.get("choices", [])
        first_choices = [choice for choice in choices if self._is_first(choice)]
        roles = [{"index": choice.get("index", 0), "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                 for choice in first_choices]  # fmt: skip
        first = [{**chunk, "choices": roles}] if roles else []
        return [*first, {**chunk, "choices": [_delta_of(choice) for choice in choices]}]

    def _is_first(self, choice: Document) -> bool:
        index = choice.get("index", 0)
        new = index not in self._started
        self._started.add(index)
        return new


_TEXT_ONLY = ("text", "prompt_logprobs", "prompt_token_ids")


def _message_of(choice: Document) -> Document:
    rest = {name: value for name, value in choice.items() if name not in _TEXT_ONLY}
    return {**rest, "message": {"role": "assistant", "content": choice.get("text", "")}, "logprobs": _logprobs(choice.get("logprobs"))}


def _delta_of(choice: Document) -> Document:
    rest = {name: value for name, value in choice.items() if name not in _TEXT_ONLY}
    text = choice.get("text", "")
    delta = {} if choice.get("finish_reason") is not None and not text else {"content": text}
    return {**rest, "delta": delta, "logprobs": _logprobs(choice.get("logprobs"))}


def _logprobs(value: Any) -> Document | None:
    """Translate the parallel lists of completions to chat's list of tokens."""
    if not isinstance(value, dict):
        return None
    tops = value.get("top_logprobs") or [None] * len(value.get("tokens", ()))
    rows = zip(value.get("tokens", ()), value.get("token_logprobs", ()), tops, strict=False)
    return {"content": [{**_token(token, logprob), "top_logprobs": [_token(*pair) for pair in (top or {}).items()]}
                        for token, logprob, top in rows]}  # fmt: skip


def _token(token: str, logprob: float | None) -> Document:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


# Developer messages


def _as_system(messages: Iterable[Any]) -> Iterator[Any]:
    """Convert ``developer`` messages to ``system`` messages. Consecutive system messages are joined, since templates accept only one."""
    system: dict[str, Any] | None = None
    contents: list[Any] = []
    for message in messages:
        if system is not None and _has_role(message, "developer"):
            contents.append(message.get("content"))
            continue
        if system is not None:
            yield {**system, "content": _joined(contents)} if len(contents) > 1 else system
            system = None
        if _has_role(message, "developer") or _has_role(message, "system"):
            system, contents = {**message, "role": "system"}, [message.get("content")]
        else:
            yield message
    if system is not None:
        yield {**system, "content": _joined(contents)} if len(contents) > 1 else system


def _has_role(message: Any, role: str) -> bool:
    return isinstance(message, dict) and message.get("role") == role


def _joined(contents: list[Any]) -> Any:
    """Join contents.

    Texts are joined with a blank line between them. Otherwise the parts of all contents are joined, with the leading texts as one part.
    """
    texts = list(takewhile(lambda content: isinstance(content, str), contents))
    text = "\n\n".join(texts)
    if len(texts) == len(contents):
        return text
    return [*(_parts(text) if texts else ()), *(part for content in contents[len(texts) :] for part in _parts(content))]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


# Functions

_CALL_ID = "call_function_{}"


def _tools(document: Document) -> Document:
    """Translate ``functions`` to ``tools``, and ``function_call`` to ``tool_choice``."""
    body = {name: value for name, value in document.items() if name not in ("functions", "function_call")}
    if (functions := document.get("functions")) is not None:
        if document.get("tools") is not None:
            raise invalid_value("Only one of 'functions' and 'tools' can be given.", param="functions")
        if not isinstance(functions, list):
            raise invalid_value("The field 'functions' must be a list.", param="functions")
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        body["parallel_tool_calls"] = False  # the deprecated form has one call
        body |= _choice(document.get("function_call"))
    return body


def _choice(call: Any) -> Document:
    if call is None:
        return {}
    if call in ("auto", "none"):
        return {"tool_choice": call}
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        return {"tool_choice": {"type": "function", "function": {"name": call["name"]}}}
    raise invalid_value("The field 'function_call' must be 'auto', 'none' or an object with a name.", param="function_call")


def _with_tool_calls(messages: Iterable[Any]) -> Iterator[Any]:
    """Translate function calls and results. Each call gets an ID by its position, and the result that follows it the same ID."""
    calls = 0
    for message in messages:
        if type(message) is dict:
            if type(message.get("function_call")) is dict:
                calls += 1
                message = _with_tool_call(message, _CALL_ID.format(calls))
            elif message.get("role") == "function":
                message = {"role": "tool", "tool_call_id": _CALL_ID.format(calls), "content": message.get("content")}
        yield message


def _with_tool_call(message: Document, identity: str) -> Document:
    called = message.copy()
    called["tool_calls"] = [{"id": identity, "type": "function", "function": called.pop("function_call")}]
    return called


class Functions:
    """Translates responses with ``tool_calls`` to ``function_call``."""

    def response(self, document: Document) -> Document:
        return {**document, "choices": [_deprecated(choice, "message", _whole_call) for choice in document.get("choices", ())]}

    def chunk(self, document: Document) -> list[Document]:
        return [{**document, "choices": [_deprecated(choice, "delta", _piece_of_call) for choice in document.get("choices", ())]}]


def _deprecated(choice: Document, field: str, call: Callable[[Iterable[Document]], Document]) -> Document:
    holder = choice.get(field)
    finish = choice.get("finish_reason")
    changed = {**choice, "finish_reason": "function_call" if finish == "tool_calls" else finish}
    if isinstance(holder, dict) and holder.get("tool_calls"):
        changed[field] = {name: value for name, value in holder.items() if name != "tool_calls"} | call(holder["tool_calls"])
    return changed


def _whole_call(calls: Iterable[Document]) -> Document:
    first = next(iter(calls))["function"]
    return {"function_call": {"name": first.get("name"), "arguments": first.get("arguments", "")}}


def _piece_of_call(calls: Iterable[Document]) -> Document:
    """Return the piece of the first call; the deprecated form supports only one call."""
    pieces = [call.get("function") or {} for call in calls if call.get("index", 0) == 0]
    return {"function_call": pieces[0]} if pieces else {}
