"""List the routes that reach a server, and the routes of vLLM that are refused on purpose: two tables.

A row of the first table contains the path at the gateway, the path at the server (vLLM has /classify and /pooling only at the
root), the ``endpoint`` label of the metrics, the dialect of its responses, and how its body is read. The rules: a path outside the
table is never forwarded, and no route of the table stores anything at the server, so a request may run twice. The second table only
gives reasons to clients. docs/routes.md shows both, and a test compares them with the real vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Dialect(StrEnum):
    """The API whose shapes a route has: usage, ends of streams and errors."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COHERE = "cohere"
    PLAIN = "plain"


class Body(StrEnum):
    """How a request body is read."""

    JSON = "json"
    FORM = "form"


@dataclass(frozen=True, slots=True)
class Route:
    """One row. ``injects``: The route supports ``stream_options.include_usage``; ``input_field`` is the field with the text."""

    path: str
    upstream: str
    endpoint: str
    dialect: Dialect = Dialect.PLAIN
    body: Body = Body.JSON
    injects: bool = False
    input_field: str = "input"

    anthropic: bool = field(init=False)
    """Errors have Anthropic's shape, and ``x-api-key`` is read."""
    takes_form: bool = field(init=False)
    """The body is a form."""
    streams: bool = field(init=False)
    """A JSON body may request a stream; on other routes vLLM ignores the request."""
    counts_tokens: bool = field(init=False)
    """The engine processes the request, so it costs tokens also if the server does not report them."""
    generates: bool = field(init=False)
    """The response has generated text."""
    repeatable: bool = field(init=False)
    """The engine does all of the work, and can do it again. A response of ``/v1/responses`` may call tools; a form cannot be sent again."""
    guided: bool = field(init=False)
    """The route has older names for constraints on the output."""
    translated: bool = field(init=False)
    """Requests in older forms are translated on the route (see ``translation``)."""
    takes: frozenset[str] = field(init=False)
    """The fields of a key that vLLM 0.32 supports on the route (its ``entrypoints``, each protocol.py)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "anthropic", self.dialect is Dialect.MESSAGES)
        object.__setattr__(self, "takes_form", self.body is Body.FORM)
        scheduled = self.path not in _UNSCHEDULED
        generates = self.dialect not in (Dialect.PLAIN, Dialect.COHERE) and scheduled
        object.__setattr__(self, "streams", generates and self.path != _BATCH)
        object.__setattr__(self, "counts_tokens", scheduled)
        object.__setattr__(self, "generates", generates or self.takes_form)
        object.__setattr__(self, "repeatable", scheduled and not self.takes_form and self.dialect is not Dialect.RESPONSES)
        object.__setattr__(self, "guided", self.dialect in (Dialect.CHAT, Dialect.COMPLETIONS))
        object.__setattr__(self, "translated", self.dialect is Dialect.CHAT and self.path != _BATCH)
        takes = _KEY_FIELDS.get(self.dialect, ("cache_salt", "priority")) if scheduled and not self.takes_form else ()
        object.__setattr__(self, "takes", frozenset(takes))


_KEY_FIELDS: Mapping[Dialect, tuple[str, ...]] = {Dialect.MESSAGES: ("cache_salt",), Dialect.COHERE: ("priority",)}
_BATCH = "/v1/chat/completions/batch"
_UNSCHEDULED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


def _simple_route(path: str, upstream: str | None = None, endpoint: str | None = None) -> Route:
    return Route(path, upstream or path, endpoint or upstream or path)


_ROWS = (
    Route("/v1/chat/completions", "/v1/chat/completions", "/v1/chat/completions", Dialect.CHAT, injects=True, input_field="messages"),
    Route(_BATCH, _BATCH, _BATCH, Dialect.CHAT, input_field="messages"),
    Route("/v1/completions", "/v1/completions", "/v1/completions", Dialect.COMPLETIONS, injects=True, input_field="prompt"),
    Route("/v1/responses", "/v1/responses", "/v1/responses", Dialect.RESPONSES),
    Route("/v1/messages", "/v1/messages", "/v1/messages", Dialect.MESSAGES, input_field="messages"),
    Route("/v1/messages/count_tokens", "/v1/messages/count_tokens", "/v1/messages/count_tokens", Dialect.MESSAGES, input_field="messages"),
    _simple_route("/v1/embeddings"),
    Route("/v2/embed", "/v2/embed", "/v2/embed", Dialect.COHERE, input_field="texts"),
    _simple_route("/v1/rerank"),
    _simple_route("/rerank", endpoint="/v1/rerank"),
    _simple_route("/v2/rerank", endpoint="/v1/rerank"),
    _simple_route("/v1/score"),
    _simple_route("/score", endpoint="/v1/score"),
    _simple_route("/v1/classify", "/classify"),
    _simple_route("/classify"),
    _simple_route("/v1/pooling", "/pooling"),
    _simple_route("/pooling"),
    Route("/v1/audio/transcriptions", "/v1/audio/transcriptions", "/v1/audio/transcriptions", body=Body.FORM),
    Route("/v1/audio/translations", "/v1/audio/translations", "/v1/audio/translations", body=Body.FORM),
    _simple_route("/tokenize"),
    _simple_route("/detokenize"),
)

ROUTES: Mapping[str, Route] = {route.path: route for route in _ROWS}
"""Routes by the path at the gateway; every route is a POST."""

ENDPOINTS: tuple[str, ...] = tuple(dict.fromkeys(route.endpoint for route in _ROWS))
"""The values of the ``endpoint`` label."""


class Output(NamedTuple):
    """How a body limits its response: the names of the fields, the last of which is set; and the default number of tokens.

    ``batch``: the limit is for each conversation in the field of this name. The field of another route is ignored (vLLM 0.32,
    ``OpenAIBaseModel`` in entrypoints/serve/engine/protocol.py).
    """

    names: tuple[str, ...]
    default: int | None = None
    batch: str | None = None


OUTPUTS: Mapping[str, Output] = {
    "/v1/chat/completions": Output(("max_completion_tokens", "max_tokens")),
    _BATCH: Output(("max_completion_tokens", "max_tokens"), batch="messages"),
    "/v1/completions": Output(("max_tokens",), 16),
    "/v1/responses": Output(("max_output_tokens",)),
    "/v1/messages": Output(("max_tokens",)),
}
"""Limits by the path at the server. Other routes generate nothing, or have their limit in a form."""


class Reason(StrEnum):
    """Why a route of vLLM is not served, as shown to clients."""

    NO_STORE = "responses are not stored, so they cannot be returned or canceled"
    WEBSOCKET = "WebSockets are not served"
    OPERATOR = "it shows internals of a server and is for its operator"
    DOCS = "the operator has not turned on the API reference, with server.docs: true"
    CONTROL = "it changes a server and is for its operator"
    BETWEEN_SERVERS = "it is for communication between servers"
    ANY_ROUTE = "its body selects the route, so no rule can be applied to it"
    NOT_COVERED = "the rules for request bodies and the usage accounting do not cover it"


REFUSED: Mapping[str, tuple[str, Reason]] = {
    "/v1/responses/{response_id}": ("GET", Reason.NO_STORE),
    "/v1/responses/{response_id}/cancel": ("POST", Reason.NO_STORE),
    "/v1/realtime": ("GET", Reason.WEBSOCKET),
    "/v1/systemone": ("POST", Reason.NOT_COVERED),
    "/generative_scoring": ("POST", Reason.NOT_COVERED),
    "/cohere/v2/chat": ("POST", Reason.NOT_COVERED),
    "/invocations": ("POST", Reason.ANY_ROUTE),
    "/ping": ("GET", Reason.OPERATOR),
    "/load": ("GET", Reason.OPERATOR),
    "/metrics": ("GET", Reason.OPERATOR),
    "/kv_event_sources": ("GET", Reason.OPERATOR),
    "/server_info": ("GET", Reason.OPERATOR),
    "/tokenizer_info": ("GET", Reason.OPERATOR),
    "/get_world_size": ("GET", Reason.OPERATOR),
    "/weight_info": ("GET", Reason.OPERATOR),
    "/weight_checker": ("POST", Reason.OPERATOR),
    "/is_paused": ("GET", Reason.OPERATOR),
    "/is_sleeping": ("GET", Reason.OPERATOR),
    "/is_scaling_elastic_ep": ("POST", Reason.OPERATOR),
    "/fault_tolerance/status": ("GET", Reason.OPERATOR),
    "/docs": ("GET", Reason.DOCS),
    "/docs/oauth2-redirect": ("GET", Reason.DOCS),
    "/redoc": ("GET", Reason.DOCS),
    "/openapi.json": ("GET", Reason.DOCS),
    "/v1/load_lora_adapter": ("POST", Reason.CONTROL),
    "/v1/unload_lora_adapter": ("POST", Reason.CONTROL),
    "/adapters": ("POST", Reason.CONTROL),
    "/adapters/{adapter_name}": ("DELETE", Reason.CONTROL),
    "/scale_elastic_ep": ("POST", Reason.CONTROL),
    "/fault_tolerance/apply": ("POST", Reason.CONTROL),
    "/start_profile": ("POST", Reason.CONTROL),
    "/stop_profile": ("POST", Reason.CONTROL),
    "/sleep": ("POST", Reason.CONTROL),
    "/wake_up": ("POST", Reason.CONTROL),
    "/release_kv_cache_memory": ("POST", Reason.CONTROL),
    "/reset_prefix_cache": ("POST", Reason.CONTROL),
    "/reset_mm_cache": ("POST", Reason.CONTROL),
    "/reset_encoder_cache": ("POST", Reason.CONTROL),
    "/collective_rpc": ("POST", Reason.CONTROL),
    "/pause": ("POST", Reason.CONTROL),
    "/resume": ("POST", Reason.CONTROL),
    "/abort_requests": ("POST", Reason.CONTROL),
    "/init_weight_transfer_engine": ("POST", Reason.CONTROL),
    "/shutdown_weight_transfer_engine": ("POST", Reason.CONTROL),
    "/start_weight_update": ("POST", Reason.CONTROL),
    "/start_draft_weight_update": ("POST", Reason.CONTROL),
    "/update_weights": ("POST", Reason.CONTROL),
    "/finish_weight_update": ("POST", Reason.CONTROL),
    "/update_weight_version": ("POST", Reason.CONTROL),
    "/inference/v1/generate": ("POST", Reason.BETWEEN_SERVERS),
    "/inference/v1/abort_requests": ("POST", Reason.BETWEEN_SERVERS),
    "/v1/chat/completions/render": ("POST", Reason.BETWEEN_SERVERS),
    "/v1/chat/completions/derender": ("POST", Reason.BETWEEN_SERVERS),
    "/v1/completions/render": ("POST", Reason.BETWEEN_SERVERS),
    "/v1/completions/derender": ("POST", Reason.BETWEEN_SERVERS),
    "/v1/messages/render": ("POST", Reason.BETWEEN_SERVERS),
    "/v1/responses/render": ("POST", Reason.BETWEEN_SERVERS),
    "/cohere/v2/chat/render": ("POST", Reason.BETWEEN_SERVERS),
}
"""By the path in vLLM 0.32: its method there, and why it is not served."""
