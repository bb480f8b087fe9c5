"""Count the delivered tokens from what clients received and from what servers sent. Pure.

The rule: nothing here uses the gateway's code. A stream of chat or completions is counted by the server's own figures in the events that
the client received, and by its logprobs if it has any. A stream of responses or messages has neither: its text is compared with the tokens
of a complete response to the same prompt.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.accounting.workload import CHAT, COMPLETIONS, THINKING, PlannedRequest
from tests.vllm.dialogues import Json

_DATA = re.compile(rb"^data: (\{.*)$", re.MULTILINE)
_MARKERS = ("<think>", "</think>")  # tokens that no client sees as text


class Tokens(NamedTuple):
    """Prompt tokens and completion tokens."""

    prompt: int
    completion: int


NO_TOKENS = Tokens(0, 0)


class Disagreement(Exception):
    """Two independent counts of the same response differ."""


def events(body: bytes) -> Iterator[Json]:
    """Yield the JSON documents of the complete events of a stream."""
    for event in body.split(b"\n\n")[:-1]:
        found = _DATA.search(event)
        if found is not None:
            yield json.loads(found[1])


def choice_events(body: bytes) -> list[Json]:
    """Return the events of a stream of chat or completions that belong to a choice."""
    return [document for document in events(body) if document.get("choices")]


def reported_usage(body: bytes) -> Tokens | None:
    """Return the usage that a complete response reports, in any of the four dialects; None without one."""
    documents = [json.loads(body)] if body.startswith(b"{") else list(events(body))
    holders = [holder for each in documents for holder in (each, each.get("response"), each.get("message")) if isinstance(holder, dict)]
    usages = [usage for holder in holders if isinstance(usage := holder.get("usage"), dict)]
    if not usages:
        return None
    prompts = [int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0) for usage in usages]
    completions = [int(usage.get("completion_tokens") or usage.get("output_tokens") or 0) for usage in usages]
    return Tokens(max(prompts), max(completions))


def running_usage(of_choices: Sequence[Json], choices: int, prompts: int) -> Tokens | None:
    """Return the sum of the last counts of each choice; None if an event has no counts. ``choices``: for each of ``prompts``."""
    latest: dict[int, Json] = {}
    for document in of_choices:
        if "usage" not in document:
            return None
        latest[document["choices"][0]["index"]] = document["usage"]
    by_prompt = {index // choices if prompts > 1 else 0: usage["prompt_tokens"] for index, usage in latest.items()}
    return Tokens(sum(by_prompt.values()), sum(usage["completion_tokens"] for usage in latest.values()))


def logprob_tokens(of_choices: Sequence[Json]) -> int:
    """Return the number of tokens with log probabilities."""
    found = [choice["logprobs"] for document in of_choices for choice in document["choices"] if choice.get("logprobs")]
    return sum(len(each["content"] if "content" in each else each["tokens"]) for each in found)


def deltas(body: bytes) -> list[str]:
    """Return the pieces of text and reasoning that a stream of responses or messages has delivered."""
    return [text for document in events(body) for text in _texts(document)]


def _texts(document: Json) -> Iterator[str]:
    delta = document.get("delta")
    if str(document.get("type")).endswith("_text.delta") and isinstance(delta, str):
        yield delta
    elif isinstance(delta, dict):
        yield from (delta[name] for name in ("text", "thinking") if isinstance(delta.get(name), str))


@dataclass(frozen=True, slots=True)
class References:
    """The counts that complete responses have shown, by kind and text.

    ``prompts``: the tokens of a prompt. ``sizes``: the bytes of text after each token of a response with reasoning; empty for a server that
    sends each token in a separate event.
    """

    prompts: Mapping[tuple[str, str], int]
    sizes: Mapping[str, Sequence[int]]

    def prompt(self, planned: PlannedRequest, positions: Sequence[int]) -> int:
        """Return the tokens of the prompts of a request at these positions."""
        kind = planned.kind if len(planned.texts) == 1 else "completion"
        return sum(self.prompts[kind, planned.texts[position]] for position in positions)

    def text_tokens(self, text: str, deltas: Sequence[str]) -> int:
        """Return how many tokens of the response to ``text`` are in these pieces of it."""
        if not self.sizes:
            return len(deltas)
        size = sum(len(delta.encode()) for delta in deltas)
        return bisect_left(self.sizes[text], size) + 1 if size else 0


def references(complete: Sequence[tuple[PlannedRequest, bytes]], *, merged: bool) -> References:
    """Read complete responses that are not streamed. ``merged``: the server may send several tokens with an event.

    Raises Disagreement if two responses count one prompt differently.
    """
    prompts: dict[tuple[str, str], int] = {}
    sizes: dict[str, Sequence[int]] = {}
    for planned, body in complete:
        usage = reported_usage(body)
        if usage is not None and prompts.setdefault((planned.kind, planned.texts[0]), usage.prompt) != usage.prompt:
            raise Disagreement(f"{planned.kind}, {planned.texts[0]}: {usage.prompt} prompt tokens")
        if merged and planned.kind == THINKING:
            sizes[planned.texts[0]] = _sizes(json.loads(body)["choices"][0]["logprobs"]["content"])
    return References(prompts, sizes)


def _sizes(tokens: Sequence[Json]) -> list[int]:
    sizes, total = [], 0
    for token in tokens:
        total += 0 if token["token"] in _MARKERS else len(token["bytes"] or ())
        sizes.append(total)
    return sizes


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its response at the client, and what the server sent for it, if that was recorded. Bodies are without framing.

    ``broken``: the connection closed before the end of the response, and the client had not disconnected.
    """

    planned: PlannedRequest
    status: int | None
    body: bytes
    whole: bool
    broken: bool = False
    server_body: bytes | None = None


def delivered(exchange: Exchange, known: References) -> Tokens:
    """Return the tokens that the client received, and the prompt tokens of the engine.

    Raises Disagreement if two methods count differently, or if the client received other events than the server sent.
    """
    planned, body = exchange.planned, exchange.body
    if exchange.status != 200:
        return NO_TOKENS
    if not planned.streamed:
        return reported_usage(body if exchange.whole else exchange.server_body or b"{}") or NO_TOKENS
    if planned.path in (CHAT, COMPLETIONS):
        return _of_choices(exchange, known)
    final = reported_usage(body)
    if is_finished(body):
        return final or NO_TOKENS
    pieces = deltas(body)
    has_prompt = final is not None or bool(pieces)  # a stream of responses shows no usage before its end
    return Tokens(known.prompt(planned, (0,)) if has_prompt else 0, known.text_tokens(planned.texts[0], pieces))


def is_finished(body: bytes) -> bool:
    """Return whether a stream of responses or messages has its last event."""
    return any(document.get("type") in ("response.completed", "response.incomplete", "message_stop") for document in events(body))


def _of_choices(exchange: Exchange, known: References) -> Tokens:
    planned = exchange.planned
    received = choice_events(exchange.body)
    if not received:
        return NO_TOKENS
    choices, prompts = planned.choices, len(planned.texts)
    positions = sorted({document["choices"][0]["index"] // choices for document in received}) if prompts > 1 else [0]
    counts = {"the client's usage": running_usage(received, choices, prompts), "the server's": _of_server(exchange, received)}
    tokens = {name: count.completion for name, count in counts.items() if count is not None}
    if planned.body.get("logprobs") is not None:
        tokens["logprobs"] = logprob_tokens(received)
    prompt = known.prompt(planned, positions)
    if len(set(tokens.values())) != 1 or any(count.prompt != prompt for count in counts.values() if count is not None):
        raise Disagreement(f"{tokens} completion tokens; {counts} with {prompt} prompt tokens")
    return Tokens(prompt, next(iter(tokens.values())))


def _of_server(exchange: Exchange, received: Sequence[Json]) -> Tokens | None:
    """Count what the server sent up to the last event of the client. The client's events are the server's without the usage."""
    if exchange.server_body is None:
        return None
    planned = exchange.planned
    sent = choice_events(exchange.server_body)[: len(received)]
    counts = running_usage(sent, planned.choices, len(planned.texts))
    if not (planned.body.get("stream_options") or {}).get("continuous_usage_stats"):
        sent = [{name: value for name, value in document.items() if name != "usage"} for document in sent]
    if not (planned.body.get("stream_options") or {}).get(
        "include_usage"
    ):  # vLLM writes it on its final usage, the gateway on the last event
        received = [{name: value for name, value in document.items() if name != "system_fingerprint"} for document in received]
    if sent != list(received):
        raise Disagreement("the client has other events than the server sent")
    return counts
