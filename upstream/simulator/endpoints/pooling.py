"""The routes of pooling models: embeddings, scores, ranks, classes (entrypoints/pooling in vLLM 0.32).

Vectors and scores are drawn from the seed and the texts, so that the same text has the same vector.
"""

from __future__ import annotations

import base64
import math
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from upstream.simulator import errors
from upstream.simulator.endpoints import fields, usage
from upstream.simulator.endpoints.fields import Fields, Priority
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, Job, ResponseShape, Transcript, context_checked, now
from upstream.simulator.text.plan import Prompt, empty_plan, prompts_of
from upstream.simulator.text.speaker import seed_of

DIMENSIONS = 16
LABELS = ("negative", "positive")

TokenIds = list[Annotated[int, Field(ge=0)]]
Scored = str | dict[str, Any]


class PoolingRequest(Fields):
    """The field that all pooling requests have."""

    priority: Priority = 0


class TextRequest(Fields):
    """The body of a pooling request with ``input``."""

    input: TokenIds | list[TokenIds] | str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    dimensions: int | None = None


class CohereContent(Fields):
    """A content part of Cohere's API."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: dict[str, str] | None = None


class CohereInput(Fields):
    """An input of Cohere's API."""

    content: list[CohereContent]


class CohereRequest(Fields):
    """The body of POST /v2/embed."""

    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[CohereInput] | None = None
    input_type: str | None = None
    output_dimension: int | None = None
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = None


class RerankRequest(Fields):
    """The body of POST /v1/rerank."""

    query: Scored
    documents: Scored | list[Scored]
    top_n: int = Field(0, ge=0)


class ScoreRequest(Fields):
    """The body of POST /v1/score."""

    text_1: Scored | list[Scored] | None = None
    text_2: Scored | list[Scored] | None = None
    queries: Scored | list[Scored] | None = None
    documents: Scored | list[Scored] | None = None
    items: Scored | list[Scored] | None = None


@dataclass(slots=True)
class Ready(ResponseShape):
    """A response without generated tokens: it is complete after the prompt has been read."""

    content: dict[str, Any]

    def step(self, _emissions: list[Emission]) -> Iterable[bytes]:
        return ()

    def closing(self) -> Iterable[bytes]:
        return ()

    def body(self) -> dict[str, Any]:
        return self.content


def embeddings(call: ApiRequest) -> Job:
    """Prepare POST /v1/embeddings. Raises ApiError."""
    request, prompts = _texts(call)
    size = _size(call, request.dimensions)
    shown = [
        {"index": at, "object": "embedding", "embedding": _shown(_vector(call, prompt, size), request)} for at, prompt in enumerate(prompts)
    ]
    return _job(call, prompts, {**_identity(call, "embd"), "data": shown})


def cohere_embeddings(call: ApiRequest) -> Job:
    """Prepare POST /v2/embed in the form of Cohere's SDK. Like most models, the simulated models have no task instructions."""
    request = fields.read(CohereRequest, call.body)
    given = [each for each in (request.texts, request.images, request.inputs) if each is not None]
    if len(given) != 1 or not given[0]:
        message = "Value error, Exactly one of texts, images, or inputs must be provided, and it must be non-empty"
        raise errors.malformed([{"type": "value_error", "loc": (), "msg": message, "input": call.body, "ctx": {"error": {}}}], ("body",))
    if request.input_type is not None:
        raise errors.plain(f"Unsupported input_type {request.input_type!r}. This model does not define any input_type task instructions.")
    size = _size(call, request.output_dimension)
    inputs = request.inputs or [_of_image(url) for url in request.images or ()]
    prompts = [Prompt.of_text(text) for text in request.texts or [_content_of(each) for each in inputs]]
    vectors = [_vector(call, prompt, size) for prompt in prompts]
    shown = {kind: [_COHERE_TYPES[kind](vector) for vector in vectors] for kind in request.embedding_types or ["float"]}
    tokens = sum(len(prompt.ids) for prompt in prompts)
    with_images = any(part.type == "image_url" for each in inputs for part in each.content)
    billed = {"input_tokens": 0 if with_images else tokens, "image_tokens": tokens if with_images else 0}
    body = {
        "id": f"embd-{call.request_id()}",
        "embeddings": shown,
        **({} if request.texts is None else {"texts": request.texts}),
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
        "response_type": "embeddings_by_type",
    }
    return _ready(call, prompts, body)


def _of_image(url: str) -> CohereInput:
    return CohereInput(content=[CohereContent(type="image_url", image_url={"url": url})])


def _content_of(given: CohereInput) -> str:
    return "\n".join(part.text or "<image>" for part in given.content)


def _bits(vector: list[float]) -> list[int]:
    """Return numbers of eight dimensions each. The first dimension is the highest bit."""
    return [sum((value >= 0) << 7 - at for at, value in enumerate(vector[start : start + 8])) for start in range(0, len(vector), 8)]


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


_COHERE_TYPES: dict[str, Callable[[list[float]], Any]] = {
    "float": list,
    "base64": _packed,
    "ubinary": _bits,
    "binary": lambda vector: [number - 128 for number in _bits(vector)],
}


def pooling(call: ApiRequest) -> Job:
    """Prepare POST /pooling. Raises ApiError."""
    request, prompts = _texts(call)
    shown = [
        {"index": at, "object": "pooling", "data": _shown(_vector(call, prompt, DIMENSIONS), request)} for at, prompt in enumerate(prompts)
    ]
    return _job(call, prompts, {**_identity(call, "pooling"), "data": shown})


def classify(call: ApiRequest) -> Job:
    """Prepare POST /classify: two labels with probabilities for each input. Raises ApiError."""
    _, prompts = _texts(call)
    return _job(
        call,
        prompts,
        {**_identity(call, "classify"), "data": [_classified(at, _draw(call, prompt.text)) for at, prompt in enumerate(prompts)]},
    )


def _classified(at: int, positive: float) -> dict[str, Any]:
    return {"index": at, "label": LABELS[positive >= 0.5], "probs": [1 - positive, positive], "num_classes": len(LABELS)}


def score(call: ApiRequest) -> Job:
    """Prepare POST /score: a number from 0 to 1 for each pair of texts. Raises ApiError."""
    request = fields.read(ScoreRequest, call.body)
    first = _listed(request.text_1 if request.text_1 is not None else request.queries)
    given = (option for option in (request.text_2, request.documents, request.items) if option is not None)
    second = _listed(next(given, None))
    if len(first) > 1 and len(first) != len(second):
        raise errors.plain("Input lengths must be either 1:1, 1:N or N:N")
    if not first or not second:
        raise errors.plain("At least one text_pair element must be given" if first else "At least one text element must be given")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    shown = [{"index": at, "object": "score", "score": _draw(call, *pair)} for at, pair in enumerate(pairs)]
    return _job(call, [Prompt.of_text(one + other) for one, other in pairs], {**_identity(call, "score"), "data": shown})


def rerank(call: ApiRequest) -> Job:
    """Prepare POST /rerank: the documents by descending relevance. Raises ApiError."""
    request = fields.read(RerankRequest, call.body)
    query, documents = _text(request.query), _listed(request.documents)
    prompts = [Prompt.of_text(query + document) for document in documents]
    results = [
        {"index": at, "document": {"text": document, "multi_modal": None}, "relevance_score": _draw(call, query, document)}
        for at, document in enumerate(documents)
    ]
    results.sort(key=_relevance, reverse=True)
    tokens = sum(len(prompt.ids) for prompt in prompts)
    identity = {"id": f"rerank-{call.request_id()}", "model": call.model()}
    body = {**identity, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}, "results": results[: request.top_n or None]}
    return _ready(call, prompts, body)


def _relevance(result: dict[str, Any]) -> float:
    return float(result["relevance_score"])


def _texts(call: ApiRequest) -> tuple[TextRequest, list[Prompt]]:
    request = fields.read(TextRequest, call.body)
    if request.input is None and request.messages is None:
        missing = {"type": "missing", "loc": ("input",), "msg": "Field required", "input": call.body}
        raise errors.malformed([missing], ("body",))
    if request.messages is not None:
        return request, [Prompt.of_text("\n".join(_text(message.get("content") or "") for message in request.messages))]
    return request, prompts_of(request.input)


def _listed(given: Scored | list[Scored] | None) -> list[str]:
    return [_text(one) for one in given] if isinstance(given, list) else [] if given is None else [_text(given)]


def _text(given: Any) -> str:
    if isinstance(given, dict):
        return "\n".join(str(part.get("text", "")) for part in given.get("content", []))
    return given if isinstance(given, str) else "\n".join(str(part.get("text", "")) for part in given)


def _identity(call: ApiRequest, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{call.request_id()}", "object": "list", "created": now(), "model": call.model()}


def _job(call: ApiRequest, prompts: list[Prompt], content: dict[str, Any]) -> Job:
    content["usage"] = usage.without_details(sum(len(prompt.ids) for prompt in prompts))
    return _ready(call, prompts, content)


def _ready(call: ApiRequest, prompts: list[Prompt], body: dict[str, Any]) -> Job:
    priority = fields.read(PoolingRequest, call.body).priority
    return Job(_transcript(call, prompts), Ready(body), stream=False, behavior=call.behavior, priority=priority)


def _transcript(call: ApiRequest, prompts: list[Prompt]) -> Transcript:
    for prompt in prompts:
        context_checked(prompt.text, len(prompt.ids), call.settings)
    return Transcript(empty_plan(tuple(prompts)))


def _draw(call: ApiRequest, *texts: str) -> float:
    return seed_of(call.settings.seed, *texts) % 10**6 / 10**6


def _size(call: ApiRequest, requested: int | None) -> int:
    """Return the size of the embeddings. As for a Matryoshka model, it may be reduced (vllm/pooling_params.py). Raises ApiError."""
    model = call.model()
    if requested is None:
        return DIMENSIONS
    if not 1 <= requested <= DIMENSIONS:
        raise errors.bad(f"Model {model!r} only supports dimensions in range [1, {DIMENSIONS}], got {requested}.")
    return requested


def _vector(call: ApiRequest, prompt: Prompt, size: int) -> list[float]:
    """Return a vector of length one."""
    draw = random.Random(seed_of(call.settings.seed, prompt.text))  # noqa: S311  determinism is the point
    raw = [draw.gauss(0, 1) for _ in range(size)]
    length = math.hypot(*raw)
    return [value / length for value in raw]


def _shown(vector: list[float], request: TextRequest) -> list[float] | str:
    return _packed(vector) if request.encoding_format == "base64" else vector
