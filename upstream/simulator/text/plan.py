"""Plans the response to a request completely, before its first token is sent.

Owns the reading of limits, stops and constraints into tokens. The rule: a pure function of the server's seed
and of the request (``GenerationRequest``), so that the same request has the same answer, streamed or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import takewhile
from typing import Any, Final

from upstream.simulator.behavior import Behavior
from upstream.simulator.text import json_schema, tokenizer
from upstream.simulator.text.speaker import Speaker, seed_of

NAME_END: Final = "\n"
"""The piece between the name of a called tool and its arguments."""


class TokenKind(Enum):
    """The part of a response that a token belongs to. SILENT tokens are counted and not shown."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()
    SILENT = auto()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token: ``text`` is the part that a client sees; ``piece`` is the token in the tokenizer."""

    kind: TokenKind
    text: str
    piece: str

    @property
    def id(self) -> int:
        return tokenizer.generated(self.piece)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of ``n`` answers."""

    tokens: tuple[Token, ...]
    finish: str
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. ``started``: the generated pieces at its end, which are the start of a response."""

    text: str
    ids: tuple[int, ...]
    started: tuple[str, ...] = ()

    @classmethod
    def of_text(cls, text: str) -> Prompt:
        return cls(text, tuple(tokenizer.encode(text)))

    @classmethod
    def of_ids(cls, ids: list[int]) -> Prompt:
        started = tuple(reversed([*takewhile(tokenizer.is_generated, reversed(ids))]))
        return cls(tokenizer.decode(ids), tuple(ids), tuple(map(tokenizer.piece_of, started)))

    @property
    def original(self) -> Prompt:
        """The prompt without the start of the response."""
        count = len(self.started)
        return Prompt(self.text.removesuffix("".join(self.started)), self.ids[: len(self.ids) - count]) if count else self


def prompts_of(given: str | list[Any] | None) -> list[Prompt]:
    """Return the prompts of a field that contains a text, texts, token IDs, or lists of token IDs."""
    if not isinstance(given, list) or (given and isinstance(given[0], int)):
        given = [] if given is None else [given]
    return [Prompt.of_text(one) if isinstance(one, str) else Prompt.of_ids(one) for one in given]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called; ``parameters`` is a JSON schema."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The generation that a request of any API requires. ``limit``: the maximum tokens of one choice."""

    prompts: tuple[Prompt, ...]
    limit: int
    n: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    minimum: int = 0
    ignore_end: bool = False
    thinking: bool = False
    forced: Callable[[Speaker], str] | None = None
    calls: tuple[Tool, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts and, prompt by prompt, their choices."""

    prompts: tuple[Prompt, ...]
    choices: tuple[Choice, ...]
    cache_salt: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def plan(request: GenerationRequest, behavior: Behavior, seed: int) -> Plan:
    """Decide every token. Raises UnsatisfiableSchemaError if a constraint cannot be satisfied."""
    choices = (
        _choice(request, behavior, prompt, partial(_speaker, seed, request.seed, number))
        for prompt in request.prompts
        for number in range(request.n)
    )
    return Plan(request.prompts, tuple(choices), request.cache_salt)


def _speaker(seed: int, request_seed: int | None, number: int, text: str) -> Speaker:
    return Speaker(seed_of(seed, text, request_seed, number))


def empty_plan(prompts: tuple[Prompt, ...]) -> Plan:
    """Return the plan of a request that generates no tokens (embeddings, scores)."""
    return Plan(prompts, ())


def _choice(request: GenerationRequest, behavior: Behavior, prompt: Prompt, speaker_of: Callable[[str], Speaker]) -> Choice:
    """Return the rest of the response that the prompt has started, or a response to the whole prompt if it has started another text."""
    started = len(prompt.started)
    tokens = _tokens(request, behavior, speaker_of(prompt.original.text), started)
    if started >= len(tokens) or any(token.piece != piece for token, piece in zip(tokens, prompt.started, strict=False)):
        tokens, started = _tokens(request, behavior, speaker_of(prompt.text), 0), 0
    choice = _limited(_stopped(_without_open_call(tokens[started:]), request), request.limit)
    holds_back = request.stops and not request.includes_stop
    return replace(choice, tokens=tuple(_held_back(choice.tokens, request.stops))) if holds_back else choice


def _without_open_call(tokens: list[Token]) -> list[Token]:
    """Show the arguments of a call that the prompt has started as content: a parser that starts here does not see the call."""
    until = next((at for at, token in enumerate(tokens) if token.kind is TokenKind.CALL), len(tokens))
    opened = (replace(token, kind=TokenKind.CONTENT) if token.kind is TokenKind.ARGUMENTS else token for token in tokens[:until])
    return [*opened, *tokens[until:]]


def _tokens(request: GenerationRequest, behavior: Behavior, speaker: Speaker, started: int) -> list[Token]:
    """Return a whole response. ``started``: its tokens that the limits of the request do not count."""
    planned = max(behavior.tokens if behavior.tokens is not None else speaker.between(24, 72), 1)
    thoughts = _thoughts(planned, behavior, speaker) if request.thinking else []
    total = request.limit + started + 1 if request.ignore_end else max(planned, request.minimum + started if request.minimum else 0)
    return [*thoughts, *_content(request, behavior, speaker, total - len(thoughts) - 1), _END]


_END = Token(TokenKind.SILENT, "", tokenizer.END)


def _thoughts(total: int, behavior: Behavior, speaker: Speaker) -> list[Token]:
    count = behavior.reasoning_tokens if behavior.reasoning_tokens is not None else max(1, min(16, total // 3))
    return [*_shown(TokenKind.REASONING, speaker.pieces(count)), *_silent([tokenizer.THOUGHT])]


def _content(request: GenerationRequest, behavior: Behavior, speaker: Speaker, count: int) -> list[Token]:
    if request.calls:
        return [token for tool in request.calls for token in _call(tool, speaker)]
    if request.forced is not None:
        return _shown(TokenKind.CONTENT, tokenizer.pieces(request.forced(speaker)))
    preface = tokenizer.pieces(f"{behavior.preface}\n\n") if behavior.preface else []
    return _shown(TokenKind.CONTENT, [*preface, *speaker.pieces(max(count, 0))])


def _shown(kind: TokenKind, pieces: list[str]) -> list[Token]:
    return [Token(kind, piece, piece) for piece in pieces]


def _silent(pieces: list[str]) -> list[Token]:
    return [Token(TokenKind.SILENT, "", piece) for piece in pieces]


def _call(tool: Tool, speaker: Speaker) -> list[Token]:
    """Return a tool call as a model writes it: invisible markup, the name, the arguments in Python's JSON spacing."""
    arguments = json.dumps(json_schema.instance(tool.parameters, speaker), ensure_ascii=False)
    return [
        *_silent([tokenizer.CALL, *tokenizer.pieces(tool.name)]),
        Token(TokenKind.CALL, tool.name, NAME_END),
        *_shown(TokenKind.ARGUMENTS, tokenizer.pieces(arguments)),
        *_silent([tokenizer.CALLED]),
    ]


def _limited(choice: Choice, limit: int) -> Choice:
    return choice if len(choice.tokens) <= limit else Choice(choice.tokens[:limit], "length")


def _stopped(tokens: list[Token], request: GenerationRequest) -> Choice:
    """End at the stop string that is complete first, after the least number of tokens; the tokens up to its last are counted."""
    content = _content_of(tokens)
    least = len(_content_of(tokens[: request.minimum]))
    starts = ((content.find(stop, max(0, least + 1 - len(stop))), stop) for stop in request.stops)
    found = [(at + len(stop), stop) for at, stop in starts if at >= 0]
    if not found:
        return Choice(tuple(tokens), "stop")
    end, stop = min(found)
    keep = end if request.includes_stop else end - len(stop)
    return Choice(tuple(_shortened(tokens[: _tokens_until(tokens, end)], keep)), "stop", stop)


def _content_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens if token.kind is TokenKind.CONTENT)


def _tokens_until(tokens: list[Token], end: int) -> int:
    """Return the number of tokens that contain the first ``end`` characters of content."""
    length = 0
    for at, token in enumerate(tokens):
        length += len(token.text) if token.kind is TokenKind.CONTENT else 0
        if length >= end:
            return at + 1
    return len(tokens)


def _shortened(tokens: list[Token], keep: int) -> list[Token]:
    """Show only the first ``keep`` characters of the content."""
    shortened: list[Token] = []
    for token in tokens:
        if token.kind is TokenKind.CONTENT:
            shown, keep = token.text[:keep], max(0, keep - len(token.text))
            token = Token(TokenKind.CONTENT if shown else TokenKind.SILENT, shown, token.piece)
        shortened.append(token)
    return shortened


def _held_back(tokens: Iterable[Token], stops: tuple[str, ...]) -> Iterator[Token]:
    """Show content later, as vLLM does: never the characters that may be the start of a stop string, until the last token."""
    *others, last = tokens
    held = ""
    for token in others:
        if token.kind is not TokenKind.CONTENT:
            yield token
            continue
        held += token.text
        shown, held = _split(held, max(0, len(held) - max(map(len, stops)) + 1))
        yield Token(TokenKind.CONTENT if shown else TokenKind.SILENT, shown, token.piece)
    held += last.text if last.kind is TokenKind.CONTENT else ""
    yield Token(TokenKind.CONTENT, held, last.piece) if held else last


def _split(text: str, at: int) -> tuple[str, str]:
    return text[:at], text[at:]
