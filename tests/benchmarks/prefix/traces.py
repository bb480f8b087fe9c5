"""The traffic: conversations that applications and agents have, and questions about long texts. Made by a seeded generator.

A prompt is a row of segments, each the whole of what is said at once; two prompts share what they share from the beginning
on. Lengths are in tokens, a multiple of a block; a token is four characters of text. Names of prompts are hashes of tuples of
numbers, which are the same in every process.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

BLOCK = 64
CHARACTERS = 4


@dataclass(frozen=True, eq=False)
class Segment:
    """A text of one role; a user's message may be two of them. ``number`` identifies it."""

    number: int
    role: str
    tokens: int

    @cached_property
    def text(self) -> str:
        """Different from the first characters on from every other segment's."""
        number = f"{self.number} "
        return (number * (self.tokens * CHARACTERS // len(number) + 1))[: self.tokens * CHARACTERS]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Segments in their order. ``nodes``: a name for each segment that includes all segments before it. ``tokens``: of all."""

    segments: tuple[Segment, ...] = ()
    nodes: tuple[int, ...] = ()
    tokens: int = 0

    def then(self, *segments: Segment) -> Prompt:
        """Return this prompt with more segments behind it."""
        nodes = itertools.accumulate(
            segments, lambda name, segment: hash((name, segment.number)), initial=self.nodes[-1] if self.nodes else 0
        )
        tokens = self.tokens + sum(segment.tokens for segment in segments)
        return Prompt((*self.segments, *segments), (*self.nodes, *itertools.islice(nodes, 1, None)), tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """The next request, its response, and the seconds that the user waits before it."""

    prompt: tuple[Segment, ...]
    completion: Segment
    pause: float


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation; ``start`` in seconds."""

    start: float
    system: tuple[Segment, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One kind of traffic. ``rate``: requests a second for each server."""

    title: str
    rate: float
    talks: Callable[[random.Random, int], Iterator[tuple[tuple[Segment, ...], tuple[Turn, ...]]]]

    def of(self, seed: int, servers: int, requests: int) -> list[Talk]:
        """Conversations with about this many requests in all, at random times, whose mean rate is the trace's."""
        draw = random.Random(seed)
        made, count = [], 0
        for system, exchanges in self.talks(draw, servers):
            made.append((system, exchanges))
            count += len(exchanges)
            if count >= requests:
                break
        length = count / (self.rate * servers)
        return sorted((Talk(draw.uniform(0, length), system, exchanges) for system, exchanges in made), key=lambda talk: talk.start)


def document(segments: tuple[Segment, ...]) -> Mapping[str, Any]:
    """The chat request of a prompt: neighbors of one role are one message."""
    groups = itertools.groupby(segments, key=lambda segment: segment.role)
    return {"messages": [{"role": role, "content": "".join(segment.text for segment in group)} for role, group in groups]}


class _Texts:
    """Creates segments with distinct numbers and lengths drawn between two bounds, short ones more often."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._numbers = itertools.count(1_000_000)

    def __call__(self, role: str, least: int, most: int) -> Segment:
        tokens = math.exp(self._draw.uniform(math.log(least), math.log(most)))
        return Segment(next(self._numbers), role, round(tokens / BLOCK) * BLOCK)


def _ranked(draw: random.Random, items: list[Segment]) -> Segment:
    """One of the items, the second half as often as the first and so on (Zipf)."""
    return draw.choices(items, [1 / rank for rank in range(1, len(items) + 1)])[0]


def _exchanges(
    draw: random.Random, text_of: _Texts, mean: float, prompt: tuple[int, int], completion: tuple[int, int], pause: float
) -> tuple[Turn, ...]:
    count = min(1 + int(draw.expovariate(1 / (mean - 1))), 30)
    return tuple(
        Turn((text_of("user", *prompt),), text_of("assistant", *completion), draw.expovariate(1 / pause) if number else 0.0)
        for number in range(count)
    )


def _chat(draw: random.Random, _: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Turn, ...]]]:
    text_of = _Texts(draw)
    systems = [text_of("system", 256, 2048) for _ in range(8)]
    while True:
        yield (_ranked(draw, systems),), _exchanges(draw, text_of, 5, (64, 512), (64, 512), 20.0)


def _agents(draw: random.Random, _: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Turn, ...]]]:
    text_of = _Texts(draw)
    system = text_of("system", 8192, 8192)
    while True:
        yield (system,), _exchanges(draw, text_of, 12, (256, 1024), (64, 256), 3.0)


def _questions(draw: random.Random, servers: int, role: str) -> Iterator[tuple[tuple[Segment, ...], tuple[Turn, ...]]]:
    text_of = _Texts(draw)
    texts = [text_of(role, 2048, 8192) for _ in range(40 * servers)]
    while True:
        text, question = _ranked(draw, texts), text_of("user", 64, 128)
        segments = (text, question) if role == "user" else (question,)
        yield (() if role == "user" else (text,)), (Turn(segments, text_of("assistant", 64, 256), 0.0),)


def _customers(draw: random.Random, servers: int) -> Iterator[tuple[tuple[Segment, ...], tuple[Turn, ...]]]:
    """llm-d's published workload: 150 customers for 8 servers, each with a context in the system prompt, and unrelated queries."""
    text_of = _Texts(draw)
    contexts = [text_of("system", 6000, 6000) for _ in range(150 * servers // 8)]
    while True:
        yield (draw.choice(contexts),), (Turn((text_of("user", 1200, 1200),), text_of("assistant", 1000, 1000), 0.0),)


TRACES: Mapping[str, Trace] = {
    "b2b-1": Trace("B2B, 1 request/s for each server", 1.0, _customers),
    "b2b-2": Trace("B2B, 2 requests/s for each server", 2.0, _customers),
    "chat": Trace("Conversations of eight applications", 2.0, _chat),
    "agents": Trace("Agents that share one long system prompt", 1.0, _agents),
    "texts": Trace("Questions about long texts, in the user's message", 1.5, lambda draw, servers: _questions(draw, servers, "user")),
    "system": Trace("Questions about long texts, in the system prompt", 1.5, lambda draw, servers: _questions(draw, servers, "system")),
}
