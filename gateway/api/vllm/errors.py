"""Maps a server's error to the error that the client gets: from vLLM's status and message to a row of the table of errors.

The rule: text that helps the client stays, with the path of the wrong field. Internals are removed (addresses, paths, other models, class
names, flags of the server), and so is the client's own text. It takes time in proportion to the lengths of the error and of the request.
Facts come from vLLM 0.32's ``entrypoints`` and are checked against a running vLLM (tests/vllm/test_wrong_fields.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import orjson

from gateway.api.errors import NAME_LIMIT, Refusal, unknown_model
from gateway.api.vllm import validation
from upstream.http.errors import EngineDead, ServerError, UpstreamError

_MESSAGE_LIMIT = 2000
_RETRY_AFTER_DIGITS = 5  # of a server's number of seconds: up to about a day

_DEAD = ("EngineCore encountered an issue", "EngineDeadError", "cannot schedule new futures after shutdown")
"""Messages of a vLLM whose engine is dead, or that is shutting down (vllm/v1/engine/exceptions.py; observed on a running vLLM)."""


def server_failure(server: str, status: int, message: str) -> UpstreamError | None:
    """Return the failure of the server that an error response reports; None for an error of the request."""
    if status < 500:
        return None
    kind = EngineDead if any(mark in message for mark in _DEAD) else ServerError
    return kind(server, f"answered with status {status}")


def from_server(
    status: int, body: bytes, model: str, input_field: str, retry_after: bytes | None = None, document: Mapping[str, Any] | None = None
) -> Refusal:
    """Map an error response of vLLM, in any of its shapes, to the gateway's error.

    ``model`` is the name that the client sent; a server's list of "valid aliases" never reaches the client. ``input_field`` is the field of
    the route that holds the text; it is named if the text is too long. ``retry_after`` is the server's header; it is passed on if it is a
    number of seconds. ``document`` is the body that the server got; the wrong field is located in it if the server does not name it.
    """
    message, kind, param = _read(body)
    refusal = classify(status, message, kind, param, model, input_field, document)
    if refusal.spec.retry_after is None or retry_after is None or not retry_after.isdigit() or len(retry_after) > _RETRY_AFTER_DIGITS:
        return refusal
    return Refusal(refusal.code, refusal.message, headers={"retry-after": retry_after.decode()})


def from_event(error: Mapping[str, Any], model: str, input_field: str, document: Mapping[str, Any] | None = None) -> Refusal:
    """Map vLLM's in-stream error object (``{"message", "type", "param", "code"}``) to the gateway's error, like ``from_server``."""
    status, message, kind = event_status(error), _text(error.get("message")), _text(error.get("type"))
    return classify(status, message, kind, _name(error.get("param")), model, input_field, document)


def event_status(error: Mapping[str, Any]) -> int:
    """Return the status that an error in a stream would have had."""
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def classify(
    status: int, message: str, kind: str, param: str | None, model: str, input_field: str, document: Mapping[str, Any] | None = None
) -> Refusal:
    """Decide which error the client gets. The rules apply in the order below."""
    if status == 404 or kind == "NotFoundError":
        return _no_route(model) if message == "Not Found" else unknown_model(model)  # FastAPI's message for a path without a route
    if kind == "NotImplementedError" and message.endswith(" API"):  # "The model does not support Chat Completions API"
        return _no_route(model)
    if status in (401, 403):  # the server refused the gateway's key: not an error of the client
        return Refusal("server_error", "The model's server refused the gateway.")
    if status == 429:  # vLLM has no such error, but a proxy in front of it may
        return Refusal("rate_limit_exceeded", "The model's server takes no more requests at the moment.")
    if status == 503:
        return Refusal("overloaded", "The model's server is overloaded.")
    message = message.rstrip()
    if _is_of_output(message, document):
        return Refusal("server_error", _BAD_OUTPUT)
    if status >= 500 or status < 400:
        return Refusal("server_error", "The model's server failed.")
    if (report := validation.read(message)) is not None:
        return _invalid(report, param, document)
    return _refused(status, message, param, input_field, document or {})


def _no_route(model: str) -> Refusal:
    """Return the error for a route that the model does not have, such as /v1/embeddings of a chat model."""
    return Refusal("not_found", f"The model `{model[:NAME_LIMIT]}` does not serve this route.")


# Reading a body


def _read(body: bytes) -> tuple[str, str, str | None]:
    """Return (message, type, param) of any error shape of vLLM: its own, FastAPI's ``detail``, Anthropic's, Cohere's, a string."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", "", None
    if not isinstance(document, dict):
        return "", "", None
    error = document.get("error", document.get("detail", document.get("message")))
    if isinstance(error, dict):
        return _text(error.get("message")), _text(error.get("type")), _name(error.get("param"))
    if isinstance(error, list):
        return _listed(error), "", None
    return _text(error), "", None


def _listed(details: list[Any]) -> str:
    """Return FastAPI's list of findings in the form that vLLM's handler writes."""
    lines = []
    for each in details[: validation.MAX_FINDINGS]:
        if isinstance(each, dict) and isinstance(each.get("loc"), list):
            path = ".".join(str(segment) for segment in each["loc"] if isinstance(segment, str | int))
            lines.append(f"  {{'type': '{_kind(each.get('type'))}', 'loc': {path!r}, 'msg': {_text(each.get('msg'))!r}")
    return "\n".join((f"{len(lines)} validation errors:", *lines)) if lines else ""


def _kind(value: object) -> str:
    return value if isinstance(value, str) and value.isidentifier() else "value_error"


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


_PATH = re.compile(r"[A-Za-z_]\w*(?:(?:\.|\[)\w+\]?)*\Z")


def _name(value: object) -> str | None:
    """Return the field's path without class names. vLLM writes ``body.9`` for a byte offset, which does not name a field."""
    if not isinstance(value, str) or value == "body" or len(value) > NAME_LIMIT:
        return None
    path = value.removeprefix("body.")
    return (validation.without_classes(path) or None) if _PATH.match(path) else None


# A response that the server could not build from the model's output

_BAD_OUTPUT = (
    "The model's output was not valid, so the server could not build a response from it. Tool arguments that are not a JSON object "
    "cause this. Try again, or use another model."
)
_OF_OUTPUT = re.compile(
    r"(?:Response|Choice|ResponseData|Event|Delta|DeltaMessage|ChatMessage|Usage|UsageInfo|LogProbs?|ContentBlock|ToolCall|FunctionCall"
    r"|FunctionDefinition\]|OutputMessage|OutputText|ReasoningItem)\Z"
)
"""Endings of the names of vLLM's response classes. The names of request classes end in Request, Param, Params or Options."""
_NOT_JSON = re.compile(r"[A-Z][a-zA-Z' \\:]{5,60}: line \d+ column \d+ \(char \d+\)\Z")  # json.JSONDecodeError


def _is_of_output(message: str, document: Mapping[str, Any] | None) -> bool:
    """Return whether vLLM refused its own response: an exception names the class, or the model's JSON could not be parsed.

    The gateway parses a request's JSON before it sends it. So invalid JSON can only be inside a string of the request that vLLM parses.
    """
    report = validation.read(message) if " validation error" in message[:40] else None
    if report is not None:
        return report.title is not None and _OF_OUTPUT.search(report.title) is not None
    return document is not None and _NOT_JSON.match(message) is not None and _bad_json(document, "") is None


# Fields that vLLM's messages do not name

_Where = Callable[[Mapping[str, Any], str], str | None]
"""Returns a path, given the document and the route's field for text."""


def _text_field(document: Mapping[str, Any], field: str) -> str | None:
    return field if field in document or "messages" not in document else "messages"


def _empty_text(document: Mapping[str, Any], field: str) -> str | None:
    """Return the field for text, or otherwise the first field with an empty text or list."""
    if field in document or "messages" in document:
        return _text_field(document, field)
    return next((name for name, value in document.items() if value in ("", []) or (isinstance(value, list) and "" in value)), None)


def _empty_list(document: Mapping[str, Any], field: str) -> str | None:
    """Return the path of the first message without content, or otherwise the field of the messages."""
    empty = (validation.dotted((*path, "content")) for path, each in validation.messages(document) if each == {**each, "content": []})
    return next(empty, _text_field(document, field))


def _first_of(*names: str) -> _Where:
    def find(document: Mapping[str, Any], _: str) -> str | None:
        return next((name for name in names if validation.holds(document, tuple(name.split(".")))), None)

    return find


def _role(document: Mapping[str, Any], _: str) -> str | None:
    """Return the path of the first message with an unknown role."""
    paths = (path for path, message in validation.messages(document) if message.get("role") not in validation.KNOWN_ROLES)
    return next((validation.dotted((*path, "role")) for path in paths), None)


def _media(document: Mapping[str, Any], _: str) -> str | None:
    """Return the path of the first part of a message that is not text."""
    for path, part in validation.parts(document, "content"):
        if isinstance(part, dict) and not str(part.get("type", "text")).endswith(("text", "refusal", "thinking")):
            return validation.dotted(path)
    return None


def _not_a_list(document: Mapping[str, Any], _: str) -> str | None:
    """Return the path of a value that vLLM iterates over without a check that it is a list."""
    if "messages" in document and not isinstance(document["messages"], list):
        return "messages"
    paths = (path for path, message in validation.messages(document) if not isinstance(message.get("tool_calls"), list | None))
    return next((validation.dotted((*path, "tool_calls")) for path in paths), None)


_JSON_TEXTS = (("structured_outputs", "json"), ("structured_outputs", "structural_tag"))
_ARGUMENTS = ("function", "arguments")


def _bad_json(document: Mapping[str, Any], _: str) -> str | None:
    """Return the path of a string that vLLM parses as JSON and that is invalid: a constraint, or the arguments of a tool call."""
    for path, text in chain(((path, validation.value_at(document, path)) for path in _JSON_TEXTS), _arguments(document)):
        try:
            orjson.loads(text if isinstance(text, str) else "{}")
        except orjson.JSONDecodeError:
            return validation.dotted(path)
    return None


def _arguments(document: Mapping[str, Any]) -> Iterator[tuple[validation.Path, Any]]:
    """Yield the arguments of tool calls, except empty text, which vLLM does not parse."""
    for path, call in validation.parts(document, "tool_calls"):
        yield (*path, *_ARGUMENTS), validation.value_at(call, _ARGUMENTS) or "{}"


_CONSTRAINTS = _first_of(
    "structured_outputs.json",
    "structured_outputs.regex",
    "structured_outputs.grammar",
    "structured_outputs.choice",
    "structured_outputs.structural_tag",
    "structured_outputs",
    "response_format.json_schema.schema",
    "response_format",
    "text.format.schema",
    "output_config.format.schema",
    "tools",
)


_EMPTY = "Input must not be empty."
_SIZE = _first_of("dimensions", "output_dimension")


class _KnownMessage(NamedTuple):
    """A message of vLLM, the field that it is about, and its replacement if it does not help the client.

    ``where`` is the field's path, or finds it. ``{0}`` in ``instead`` is the pattern's group.
    """

    pattern: str
    where: _Where | str
    instead: str | None = None
    code: str = "invalid_value"


def _not_enabled(pattern: str, what: str, where: _Where | str) -> _KnownMessage:
    return _KnownMessage(pattern, where, f"{what} not enabled for this model; ask the operator.", "feature_not_enabled")


_KNOWN = (
    _not_enabled(r"--enable-auto-tool-choice|--tool-call-parser", "Tools are", _first_of("tools", "tool_choice")),
    _not_enabled(
        r"--trust-request-chat-template", "Chat templates in requests are", _first_of("chat_template", "chat_template_kwargs.chat_template")
    ),
    _not_enabled(
        r"--trust-request-mm-kwargs", "Options of media processing in requests are", _first_of("mm_processor_kwargs", "media_io_kwargs")
    ),
    _not_enabled(r"--reasoning-parser|--reasoning-config", "Bounds on reasoning are", _first_of("thinking_token_budget", "thinking")),
    _not_enabled(r"--enable-prompt-embeds", "Embeddings as prompts are", _first_of("prompt_embeds")),
    _not_enabled(r"--enable-mm-embeds", "Embeddings as images, sounds or videos are", _media),
    _not_enabled(r"--pooler-config\.task", "This task is", "task"),
    _not_enabled(r"No IOProcessor plugin", "Data for a plugin is", _first_of("data", "task")),
    _not_enabled(r"chat template if the tokenizer does not define one", "Chat messages are", "messages"),
    _KnownMessage(r"is not a multimodal model", _media, "This model takes text only: no images, sounds or videos."),
    _KnownMessage(r"At most 0 (image|audio|video)\(s\) may be provided", _media, "This model takes no {0} parts."),
    _KnownMessage(r"At most \d+ \w+\(s\) may be provided", _media),
    _KnownMessage(r"empty conversation", _empty_list, _EMPTY),
    _KnownMessage(r"message role|[Rr]oles must alternate|[Uu]nknown role", _role),
    _KnownMessage(r"'\w+' object is not iterable\Z", _not_a_list, "Input should be a valid list"),
    _KnownMessage(_NOT_JSON.pattern, _bad_json, "The text is not valid JSON."),
    _KnownMessage(r"\AToken id -?\d+ is out of vocabulary", _text_field),
    _KnownMessage(r"[Pp]rompt cannot be empty|at least one prompt|[Aa]t least one text element", _empty_text, _EMPTY),
    _KnownMessage(r"text_pair element", _first_of("documents", "text_2", "data_2", "items"), "The list needs at least one text."),
    _KnownMessage(r"[Mm]atryoshka embeddings", _SIZE, "This model's embeddings have one size only, so it can't be set."),
    _KnownMessage(r"only supports dimensions in range (\[\d+, \d+\])", _SIZE, "The number must be in the range {0}."),
    _KnownMessage(r"only supports Matryoshka dimensions (\[[\d, ]{1,200}\])", _SIZE, "The number must be one of {0}."),
    _KnownMessage(r"Requested sample logprobs of", _first_of("top_logprobs", "logprobs")),
    _KnownMessage(r"'json_schema' field must be provided", "response_format.json_schema", "Field required", "missing_required_parameter"),
    _KnownMessage(
        r"\A(?:Invalid value for `tool_choice`|tool_choice )",
        "tool_choice",
        "Only named tools, 'none', 'auto' or 'required' are supported.",
    ),
    _KnownMessage(
        r"one kind of (?:structured outputs constraint|constraints for structured outputs)",
        "structured_outputs",
        "Exactly one constraint must be set.",
    ),
    _KnownMessage(
        r"[Gg]rammar|[Rr]egex|JSON [Ss]chema|json_schema|structural.tag|jsonschema|Invalid type: |choices into|structured outputs?\b",
        _CONSTRAINTS,
    ),
)
"""They are tried in this order."""

_OVERFLOW = re.compile(r"maximum context length is \d+|longer than the maximum model length|max_model_len")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TOO_LONG = ("input_tokens", "input_text")  # the names that vLLM uses if the text does not fit
_PARAMETER = re.compile(r"\(parameter=[\w.\[\]]+(?:, value=|\)$)")
_INSIDE = re.compile(r"(?:unix|https?|tcp|ipc)://?\S+|(?<![\w.<])/(?:[\w.@+-]+/)+[\w.@+-]*|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]+|\bVLLM_[A-Z]|environment variable")
_CAUSE = re.compile(r"^(?:error: )(.{1,300})$", re.MULTILINE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_FIRST = re.compile(r"[`']?([a-z][a-z0-9_]{0,63}(?:\.\w{1,63})?)\b")
_ENABLE = "This request needs a feature that is not enabled for this model; ask the operator."


def _invalid(report: validation.ErrorReport, param: str | None, document: Mapping[str, Any] | None) -> Refusal:
    """Return the error for pydantic's findings, as sentences."""
    if (found := validation.explain(report, document)) is None:
        text = f"{param}: Input is not valid" if param else "The request does not have the right shape."
        found = validation.Explanation(text, param, missing=False)
    code = "missing_required_parameter" if found.missing else "invalid_value" if found.param else "invalid_request"
    return Refusal(code, _INSIDE.sub("…", found.message)[:_MESSAGE_LIMIT], param=found.param)


def _refused(status: int, message: str, param: str | None, input_field: str, document: Mapping[str, Any]) -> Refusal:
    """Return the error for vLLM's own message, with the field that it is about."""
    if param in _LENGTHS and document.get(param) is None:  # vLLM has a single name for the field that each route names differently
        sent = next((name for name in _LENGTHS if document.get(name) is not None), param)
        message, param = message.replace(param, sent), sent
    if param in _TOO_LONG or (_OVERFLOW.search(message) and status == 400):
        blamed = input_field if param in _TOO_LONG else param
        return Refusal("context_length_exceeded", _helpful(message) or "The input is too long for this model.", param=blamed)
    if status == 413:
        return Refusal("request_too_large", _helpful(message) or "The request is too large.")
    if status == 415:
        return Refusal("unsupported_media_type", _helpful(message) or "The content type is not supported.")
    code, own = "invalid_value", False
    for known in _KNOWN:
        if (found := re.search(known.pattern, message)) is not None:
            where = known.where if isinstance(known.where, str) else known.where(document, input_field)
            param, code = where or param, known.code
            if known.instead is not None:
                message, own = known.instead.format(*found.groups("")), True
            break
    else:
        param = param or _first_field(message, document)
    text = _helpful(_without_echo(message, param, document))
    if not text and message:
        return Refusal("feature_not_enabled", _ENABLE, param=param)
    if param and text and not _names(text, param, own=own):
        text = f"{param}: {text}"
    return Refusal(code if param or code != "invalid_value" else "invalid_request", text or "The request is not valid.", param=param)


def _names(text: str, param: str, *, own: bool) -> bool:
    """Return whether a sentence names the field. In the gateway's own sentences only a quoted name counts: other text is English."""
    return f"'{param}'" in text or (not own and re.search(rf"(?<![\w.]){re.escape(param)}(?![\w]|\.\w)", text) is not None)


def _first_field(message: str, document: Mapping[str, Any]) -> str | None:
    """Return the field that a message starts with, as in ``min_p must be in [0, 1]``."""
    first = _FIRST.match(message)
    return None if first is None else _first_of(first[1], first[1].partition(".")[0])(document, "")


def _without_echo(message: str, param: str | None, document: Mapping[str, Any]) -> str:
    """Remove the client's own text if the message repeats the whole value of the field."""
    value = validation.value_at(document, tuple((param or "").split(".")))
    if isinstance(value, str) and 2 < len(value) < _MESSAGE_LIMIT:
        return message.replace(f": {value!r}", "").replace(f": {value}", "").replace(value, "…")
    return message


def _helpful(message: str) -> str:
    """Remove the server's internals from its message."""
    message = message.rstrip()
    parameter = _PARAMETER.search(message) if message.endswith(")") else None
    if parameter is not None:
        message = message[: parameter.start()]
    first, line_break, rest = message.partition("\n")
    if line_break:  # a drawing of the position in a regular expression or a grammar, and the error there
        cause = _CAUSE.search(rest)
        message = first if cause is None else f"{first} {cause[1]}"
    if _FLAG.search(message) is not None:  # settings of the server are the operator's to change
        message = " ".join(each for each in _SENTENCE.split(message) if _FLAG.search(each) is None)
    return _INSIDE.sub("…", message).strip()[:_MESSAGE_LIMIT]
