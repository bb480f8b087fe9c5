"""The fields that a response must have, and the one check for them.

A shape is "at least this": an object may have members that its shape does not name. A shape is a type, a constant,
an object or list of shapes, or one of the classes below. The rule: ``lacks`` names every difference by its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonText:
    """A string that holds JSON of this shape."""

    shape: Any


@dataclass(frozen=True, slots=True)
class Nullable:
    """This shape, null or nothing."""

    shape: Any


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these constants."""

    values: tuple[Any, ...]


class FilledText:
    """A string that is not empty."""


def lacks(value: Any, shape: Any, path: str = "$") -> list[str]:
    """Every way in which a value is less than its shape, each with its path; empty when it conforms."""
    return list(_lacks(value, shape, path))


def _lacks(value: Any, shape: Any, path: str) -> Iterator[str]:
    if isinstance(shape, dict):
        yield from _fields(value, shape, path)
    elif isinstance(shape, list):
        yield from _items(value, shape[0], path)
    elif isinstance(shape, Nullable):
        if value is not None:
            yield from _lacks(value, shape.shape, path)
    elif isinstance(shape, JsonText):
        yield from _json_text(value, shape.shape, path)
    elif not _is(value, shape):
        yield f"{path} is {value!r}, not {shape!r}"


def _fields(value: Any, shape: dict[str, Any], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path} is {value!r}, not an object"
        return
    for name, below in shape.items():
        if name not in value and below is not None and not isinstance(below, Nullable):
            yield f"{path}.{name} is missing"
        else:
            yield from _lacks(value.get(name), below, f"{path}.{name}")


def _items(value: Any, shape: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list) or not value:
        yield f"{path} is {value!r}, not a list with something in it"
        return
    for index, item in enumerate(value):
        yield from _lacks(item, shape, f"{path}[{index}]")


def _json_text(value: Any, shape: Any, path: str) -> Iterator[str]:
    try:
        inside = json.loads(value)
    except (TypeError, ValueError):
        yield f"{path} is {value!r}, not JSON in a string"
        return
    yield from _lacks(inside, shape, f"{path}(JSON)")


def _is(value: Any, shape: Any) -> bool:
    if shape is FilledText:
        return isinstance(value, str) and bool(value)
    if isinstance(shape, OneOf):
        return value in shape.values
    if isinstance(shape, type):
        kinds = (int, float) if shape is float else (shape,)
        return isinstance(value, kinds) and (shape is bool or not isinstance(value, bool))
    return type(value) is type(shape) and bool(value == shape)


# Shapes in the documents

USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}
TOKEN = {"token": str, "logprob": float, "bytes": list}
LOGPROBS = {"content": [{**TOKEN, "top_logprobs": [TOKEN]}]}
FUNCTION = {"name": FilledText, "arguments": JsonText({"location": str})}
CALL = {"id": FilledText, "type": "function", "function": FUNCTION}
ERROR = {"error": {"message": FilledText, "type": FilledText, "code": FilledText}}


def completion(message: dict[str, Any], finish: Any = "stop", logprobs: Any = None) -> dict[str, Any]:
    """A whole answer with this in its message."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "logprobs": logprobs}
    return {"id": FilledText, "object": "chat.completion", "created": int, "model": FilledText, "choices": [choice], "usage": USAGE}


TEXT = completion({"content": FilledText})
THOUGHT = completion({"content": FilledText, "reasoning": FilledText})
CALLED = completion({"content": Nullable(str), "tool_calls": [CALL]}, "tool_calls")
CALLED_BY_NAME = completion({"content": Nullable(str), "tool_calls": [CALL]}, OneOf(("tool_calls", "stop")))  # vLLM says stop
JSON_OBJECT = completion({"content": JsonText(dict)})
TAGLINES = completion({"content": JsonText({"taglines": [str]})})
CUT = completion({"content": FilledText}, "length")
WEIGHED = completion({"content": FilledText}, logprobs=LOGPROBS)

FINISHED = OneOf(("stop", "tool_calls", "function_call", "length"))
CHUNK = {
    "id": FilledText,
    "object": "chat.completion.chunk",
    "created": int,
    "model": FilledText,
    "choices": [{"index": int, "delta": dict, "finish_reason": Nullable(FINISHED)}],
    "usage": None,
}


def stream_lacks(chunks: list[dict[str, Any]], *, usage: bool, reasoning: bool = False) -> list[str]:
    """Every way in which the chunks of one choice are less than the documents' streams."""
    counted = [chunk for chunk in chunks if chunk.get("choices") == []]
    spoken = [chunk for chunk in chunks if chunk.get("choices") != []]
    problems = [problem for at, chunk in enumerate(spoken) for problem in lacks(chunk, CHUNK, f"chunk {at}")]
    if problems or not spoken:
        return problems or ["there is no chunk"]
    deltas = [chunk["choices"][0]["delta"] for chunk in spoken]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in spoken]
    thoughts, texts = ([at for at, delta in enumerate(deltas) if delta.get(field)] for field in ("reasoning", "content"))
    rules = {
        "the first delta has the role": deltas[0].get("role") == "assistant",
        "some delta has content": bool(texts),
        "the last choice, and only that, has finish_reason stop": finishes[-1] == "stop" and not any(finishes[:-1]),
        "one id": len({chunk["id"] for chunk in chunks}) == 1,
        "usage comes once, last, to those who ask": [chunk is chunks[-1] for chunk in counted] == [True] * usage,
        "usage is whole": not usage or (counted != [] and lacks(counted[-1]["usage"], USAGE) == []),
        # An engine that is behind puts several tokens into one delta: the last of the one and the first of the other may share it.
        "reasoning comes, before the content": not reasoning or (bool(thoughts) and max(thoughts) <= min(texts, default=-1)),
    }
    return [rule for rule, stored in rules.items() if not stored]
