"""Request one chat completion from a server and join its parts, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tests.vllm.dialogues import ChatResult, Json


def send_chat(client: httpx2.Client, body: Json, *, streamed: bool) -> ChatResult:
    """Request one chat completion. Return its joined parts."""
    extra = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    response = client.post("/v1/chat/completions", json={"model": "tiny", **body, **extra})
    assert response.status_code == 200, response.text
    parts = events(response.text) if streamed else [response.json()]
    assert parts[-1]["usage"]["completion_tokens"] > 0
    return folded([choice for part in parts for choice in part["choices"]])


def events(text: str) -> list[Any]:
    """Return the JSON of a stream's events. Split at blank lines, not at lines, since a text can contain U+2028."""
    *frames, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def folded(choices: list[Json]) -> ChatResult:
    """Return the complete result from its deltas, or from the one message."""
    deltas: list[Json] = [choice["delta"] if "delta" in choice else choice["message"] for choice in choices]
    [finish_reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        for position, call in enumerate(delta.get("tool_calls") or []):
            function, index = call["function"], call.get("index", position)
            name, arguments = calls.get(index, ("", ""))
            calls[index] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
    made = tuple((name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items()))
    return ChatResult(joined(deltas, "reasoning"), joined(deltas, "content"), made, finish_reason)


def joined(deltas: list[Json], key: str) -> str:
    return "".join(delta.get(key) or "" for delta in deltas)
