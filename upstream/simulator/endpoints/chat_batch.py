"""POST /v1/chat/completions/batch: several conversations in one request (openai/chat_completion/batch_serving.py in vLLM 0.32).

The rule: each conversation is a separate chat request with all other fields of the body, and has one choice of the response.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from upstream.simulator import errors
from upstream.simulator.endpoints import chat, fields, usage
from upstream.simulator.endpoints.fields import Fields
from upstream.simulator.engine.job import ApiRequest, Job, Transcript

_SINGLE = ("messages", "stream", "stream_options", "tools", "tool_choice")


class Conversations(Fields):
    """The ``messages`` of a batch: a list of conversations."""

    messages: Annotated[list[Annotated[list[chat.Message], Field(min_length=1)]], Field(min_length=1)]


def job(call: ApiRequest) -> Job:
    """Understand a request. Raises ApiError."""
    singles = [chat.prepare(one, chat.read(one)) for one in _calls(call)]
    first = singles[0]
    limit = min(single.generation.limit for single in singles)
    combined = replace(first.generation, prompts=tuple(single.generation.prompts[0] for single in singles), limit=limit)
    planned, refusal = call.planned(combined)
    transcript = Transcript(planned)
    response = BatchResponse(call, replace(first, generation=combined), transcript)
    refusal, priority = first.refusal or refusal, first.request.priority
    return Job(transcript, response, stream=False, behavior=call.behavior, refusal=refusal, priority=priority)


def _calls(call: ApiRequest) -> list[ApiRequest]:
    """Return each conversation as a chat request. Raises ApiError."""
    if call.body.get("n", 1) not in (None, 1):
        raise errors.bad("Batch chat completions do not support `n > 1`. Please set `n` to 1.", "n", call.body["n"])
    fields.read(Conversations, call.body)
    shared = {name: value for name, value in call.body.items() if name not in _SINGLE}
    return [replace(call, body={**shared, "messages": messages}) for messages in call.body["messages"]]


class BatchResponse(chat.ChatResponse):
    """The shape of the response: like chat, without usage details and without the tokens of the prompts."""

    def body(self) -> dict[str, Any]:
        counts = usage.counts(self._transcript.prompt_tokens, self._transcript.completion_tokens)
        details = {"prompt_tokens_details": None, "completion_tokens_details": None}
        return {**super().body(), "usage": {**counts, **details}, "prompt_token_ids": None, "prompt_text": None}
