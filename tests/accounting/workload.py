"""Draw the requests of an accounting run: their kind, their body, and where their clients disconnect.

The rule: everything is drawn from a seed. The prompt of a request depends only on its kind and text, so a complete response to one request
shows the prompt tokens of all requests with the same kind and text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from tests.vllm.dialogues import HANGZHOU, PROMPT_AND_CONTINUATION, WEATHER, Json, user

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ROUTES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
TEXTS = (
    "Who are you?",
    "Which is greater, 9.11 or 9.8?",
    "Explain Qwen in three short bullet points.",
    "Give me the capital of France as JSON.",
    "Say hello in Chinese with emoji.",
    "Count from 1 to 100.",
    "Print something tricky.",
    "Never stop.",
)
MOST_TEXTS = len(TEXTS) + 1
FEWEST_TOKENS, MOST_TOKENS = 4, 64
THINKING = "thinking"
"""The kind whose complete responses show each token of the texts that /v1/responses and /v1/messages generate as well."""
_WITHOUT_THINKING: Json = {"chat_template_kwargs": {"enable_thinking": False}}
_LONGEST_WAIT = 0.5  # seconds until a client disconnects that does not count events


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request. ``body`` gets the random numbers, the texts and the limit on completion tokens.

    ``prompts``: the number of prompts in one request. ``texts``: those that it can have. ``weight``: its share among all kinds.
    """

    path: str
    body: Callable[[Random, Sequence[str], int], Json]
    prompts: int = 1
    texts: Sequence[str] = TEXTS
    weight: int = 2


@dataclass(frozen=True, slots=True)
class Disconnect:
    """When a client disconnects: after this number of events, or without one, after ``seconds``."""

    events: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a run. ``texts`` are its prompts; ``disconnect`` is None if its client reads the whole response."""

    number: int
    kind: str
    texts: Sequence[str]
    body: Json
    disconnect: Disconnect | None = None

    @property
    def path(self) -> str:
        return KINDS[self.kind].path

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def choices(self) -> int:
        """The number of choices for each prompt."""
        return int(self.body.get("n", 1))


def _chat(text: str, limit: int, **more: object) -> Json:
    return {"messages": [user(text)], "temperature": 0, "max_tokens": limit, **more}


def _plain(_: Random, texts: Sequence[str], limit: int) -> Json:
    return _chat(texts[0], limit, **_WITHOUT_THINKING)


def _thinking(_: Random, texts: Sequence[str], limit: int) -> Json:
    return _chat(texts[0], limit)


def _choices(rng: Random, texts: Sequence[str], limit: int) -> Json:
    return _plain(rng, texts, limit) | {"temperature": 1, "n": rng.randint(1, 3)}


def _tools(_: Random, texts: Sequence[str], limit: int) -> Json:
    return _chat(texts[0], 2 * limit, tools=[WEATHER])


def _logprobs(rng: Random, texts: Sequence[str], limit: int) -> Json:
    return _plain(rng, texts, limit) | {"temperature": 1, "n": rng.randint(1, 3), "logprobs": True}


def _visible_usage(rng: Random, texts: Sequence[str], limit: int) -> Json:
    return _plain(rng, texts, limit) | {"stream_options": {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}}


def _completion(rng: Random, texts: Sequence[str], limit: int) -> Json:
    return {"prompt": texts[0], "max_tokens": limit, "temperature": 1, "n": rng.randint(1, 3), "ignore_eos": True}


def _completion_logprobs(rng: Random, texts: Sequence[str], limit: int) -> Json:
    return _completion(rng, texts, limit) | {"logprobs": 0}


def _echo(_: Random, texts: Sequence[str], limit: int) -> Json:
    return {"prompt": texts[0], "max_tokens": limit, "temperature": 0, "ignore_eos": True, "echo": True}


def _prompts(rng: Random, texts: Sequence[str], limit: int) -> Json:
    return _completion(rng, texts, limit) | {"prompt": list(texts)}


def _response(_: Random, texts: Sequence[str], limit: int) -> Json:
    return {"input": texts[0], "max_output_tokens": limit, "temperature": 0}


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "chat": Kind(CHAT, _plain),
        THINKING: Kind(CHAT, _thinking),
        "chat, choices": Kind(CHAT, _choices),
        "chat, tools": Kind(CHAT, _tools, texts=(HANGZHOU,)),
        "chat, logprobs": Kind(CHAT, _logprobs),
        "chat, visible usage": Kind(CHAT, _visible_usage),
        "completion": Kind(COMPLETIONS, _completion, texts=(*TEXTS, PROMPT_AND_CONTINUATION[0])),
        "completion, logprobs": Kind(COMPLETIONS, _completion_logprobs, weight=1),
        "completion, echo": Kind(COMPLETIONS, _echo, weight=1),
        "completion, prompts": Kind(COMPLETIONS, _prompts, prompts=3),
        "response": Kind(RESPONSES, _response, weight=3),
        "message": Kind(MESSAGES, _thinking, weight=3),
    }
)


def reference_requests(texts: int = MOST_TEXTS) -> list[PlannedRequest]:
    """Return complete requests that show the prompt tokens of each kind and text, and each token of the texts.

    ``texts``: use only this number of texts of each kind.
    """
    rng = Random(0)
    pairs = [(name, text) for name, kind in KINDS.items() if kind.prompts == 1 for text in kind.texts[:texts]]
    bodies = [KINDS[name].body(rng, (text,), MOST_TOKENS) for name, text in pairs]
    requests = [PlannedRequest(number, name, (text,), body) for number, ((name, text), body) in enumerate(zip(pairs, bodies, strict=True))]
    for request in requests:
        request.body.pop("stream_options", None)
        if request.kind == THINKING:
            request.body["logprobs"] = True
    return requests


def draw(rng: Random, number: int, disconnecting: float, texts: int = MOST_TEXTS) -> PlannedRequest:
    """Draw a request. ``disconnecting``: the probability that its client disconnects. ``texts``: as for the references."""
    name = rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
    kind = KINDS[name]
    prompts, limit = tuple(rng.choices(kind.texts[:texts], k=kind.prompts)), rng.randint(FEWEST_TOKENS, MOST_TOKENS)
    body = kind.body(rng, prompts, limit)
    if rng.random() < 0.7:
        body["stream"] = True
    else:
        body.pop("stream_options", None)
    disconnect = _disconnect(rng, limit, streamed="stream" in body) if rng.random() < disconnecting else None
    return PlannedRequest(number, name, prompts, body, disconnect)


def _disconnect(rng: Random, limit: int, *, streamed: bool) -> Disconnect:
    if streamed and rng.random() < 0.85:
        return Disconnect(events=rng.randint(1, limit))
    return Disconnect(seconds=rng.uniform(0, _LONGEST_WAIT))
