"""What a request may use, guessed before it is sent, and what it has used, by its record. Pure.

The rule: a guess is only ever reserved; what stays counted is the server's own usage. Where an answer was broken off
before its usage came, what the client has seen of it counts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.api.errors import CLIENT_CLOSED_REQUEST, Refusal
from gateway.api.lax_int import whole
from gateway.api.media_urls import CONTAINERS, data_urls
from gateway.api.routes import OUTPUTS, Output
from gateway.api.usage import Usage
from gateway.auth.body_policy import NO_MEDIA
from gateway.limits.rules import Amounts
from gateway.system.steps import finished

BYTES_PER_TOKEN = 4
"""Of a body; English text has a little more in a token, most other languages less."""
DEFAULT_COMPLETION = 1024
"""Tokens that an answer may have where the request does not say."""
MEDIA_TOKENS = 1024
"""Tokens for an image, sound or film that the body holds as a ``data:`` URL."""

_MEDIA, _IN_URL = b";base64,", ";base64,"
_TYPE = 256  # characters in which a media type is over
_FEW = 4096  # bytes that are searched in the time in which a message is looked through
_VALUES_PER_STEP = 20_000
_MILLION = 1_000_000


class TokenEstimate(msgspec.Struct, frozen=True, gc=False):
    """Of one request."""

    prompt: int = 0
    completion: int = 0
    choices: int = 1
    """Answers that ``completion`` is for."""


def estimate(document: Mapping[str, Any], path: str, body: bytes | bytearray, prompt: int | None = None) -> TokenEstimate:
    """What a request may use at most, about. ``path``: where it goes at the server; ``body``: as the client sent it; ``prompt``: its
    tokens, where they are known."""
    output = OUTPUTS.get(path)
    size = len(body)
    if prompt is None:
        may_have_media = (size >= _FEW and _few_to_look_through(document, size)) or _MEDIA in body
        prompt = finished(_with_media(document, size)) if may_have_media else size // BYTES_PER_TOKEN
    choices = _choices(document) if "n" in document or "prompt" in document else 1
    if output is None:
        return TokenEstimate(prompt or 1, 0, choices)
    if output.batch is not None and isinstance(conversations := document.get(output.batch), list):
        choices *= len(conversations)
    return TokenEstimate(prompt or 1, _completion(document, output) * choices, choices)


def estimate_in_steps(document: Mapping[str, Any], path: str, body: bytes | bytearray) -> Generator[None, None, TokenEstimate]:
    """The same for a large body, in steps."""
    return estimate(document, path, body, (yield from _with_media(document, len(body))))


def _few_to_look_through(document: Mapping[str, Any], size: int) -> bool:
    """To search a long body costs more than to look through a few messages."""
    messages = document.get("messages")
    return type(messages) is list and len(messages) * _FEW < size


def _with_media(document: Mapping[str, Any], size: int) -> Generator[None, None, int]:
    """Prompt tokens of a body of ``size`` bytes in which there may be media. Ordinary text is not searched for media."""
    pending = [value for name, value in document.items() if type(value) in CONTAINERS and name not in NO_MEDIA]
    count = total = 0
    while pending:
        for url in data_urls(pending, _VALUES_PER_STEP):
            if _IN_URL in url[:_TYPE]:
                count += 1
                total += len(url)
        yield
    return max(size - total, 0) // BYTES_PER_TOKEN + count * MEDIA_TOKENS


def _completion(document: Mapping[str, Any], output: Output) -> int:
    for name in output.names:
        if name in document:
            value = document[name]
            number = value if type(value) is int else whole(value)
            if number is not None and number > 0:
                return number
    return DEFAULT_COMPLETION if output.default is None or output.names[-1] in document else output.default


def _choices(document: Mapping[str, Any]) -> int:
    """Answers that are asked for: of each prompt of a list as many as ``n`` says, which is the width of a beam search, too.

    vLLM 0.32 knows no ``best_of``.
    """
    n, prompt = document.get("n"), document.get("prompt")
    many = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    if n is not None and type(n) is not int:
        n = whole(n)
    return many * n if n is not None and n > 1 else many


def apply_max_tokens(document: dict[str, Any], path: str, limit: int | None) -> None:
    """Hold a request to so many tokens of an answer: refuse one that asks for more, and set it where none is asked for."""
    output = OUTPUTS.get(path)
    if output is None or limit is None:
        return
    given = [name for name in output.names if document.get(name) is not None]
    for name in given:
        value = document[name]
        if type(value) is not int:
            value = whole(value)
        if value is None:
            raise Refusal("invalid_value", f"The field '{name}' must be a whole number.", param=name)
        if value > limit:
            raise Refusal("invalid_value", f"The field '{name}' may be {limit} at most for this key.", param=name)
    unsaid = output.default is None or output.names[-1] in document
    if not given and (unsaid or (output.default or 0) > limit):
        document[output.names[-1]] = limit


def amounts_of(tokens: TokenEstimate, price: tuple[float, float] | None, requests: int = 0, slots: int = 0) -> Amounts:
    """Tokens as what limits count. ``price`` is per million prompt and completion tokens."""
    cost = 0.0 if price is None else (tokens.prompt * price[0] + tokens.completion * price[1]) / _MILLION
    return Amounts(requests, slots, tokens.prompt + tokens.completion, cost)


class Outcome(NamedTuple):
    """What became of a request: whether a server was asked, the status sent, the server's count, the events of a stream that
    passed, who broke the answer off, if anybody, and whether it had no place for a count."""

    reached_server: bool
    status: int
    usage: Usage | None
    events: int
    incomplete: str | None
    uncounted: bool = False


def used_tokens(outcome: Outcome, guess: TokenEstimate) -> TokenEstimate:
    """What counts of a request that is over.

    Nothing where the client got an error; the prompt and what was seen of an answer that was broken off, by whomever, of a
    stream whose server told no count, and of one that had no place for it.
    """
    _, status, usage, events, incomplete, uncounted = outcome
    if not outcome.reached_server or (status >= 400 and status != CLIENT_CLOSED_REQUEST):
        return TokenEstimate()
    if incomplete is None and (usage is not None or not (events or uncounted)):
        return TokenEstimate() if usage is None else TokenEstimate(usage.prompt, usage.completion)
    if usage is None:
        return TokenEstimate(guess.prompt, events)
    return TokenEstimate(usage.prompt or guess.prompt, max(usage.completion, events))


def counts_as_request(outcome: Outcome) -> bool:
    """Whether a request counts as one: not where a limit, the gateway or the server refused or failed it."""
    return outcome.status < 500 and outcome.status != 429


def smallest(limits: Iterable[int | None]) -> int | None:
    """The bound that holds where several do."""
    return min((limit for limit in limits if limit is not None), default=None)
