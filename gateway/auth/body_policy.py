"""Decide what a client may put into a request body: one table, compiled for each model when a snapshot is applied.

The rule: a request costs a few set operations and one scan of its lists; decisions that depend on the configuration are made in advance.
Each row can be lifted by ``body.allow``. ``body.max_tokens`` is checked here, and set by ``proxy.payload`` in a request without a limit;
the limits of a key bound a response in ``limits.estimate``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Set
from typing import Any

import orjson

from gateway.api.errors import Refusal, invalid_value
from gateway.api.media_urls import CONTAINERS, InlineMedia, MediaHosts, path_to, refused_url_field
from gateway.snapshot.snapshot import BodyRules, Model

Document = dict[str, Any]

STRIPPED = frozenset({"priority", "request_id", "session_id", "cache_salt", "return_prompt_text"})
"""Fields that only the gateway sets: they are removed."""

REFUSED = frozenset(
    {
        "chat_template",
        "ec_transfer_params",
        "kv_transfer_params",  # its prompt_token_ids would replace the checked messages
        "media_io_kwargs",
        "mm_processor_kwargs",
        "prompt_logprobs",
        "use_beam_search",
        "vllm_xargs",
    }
)
"""Fields that change the response: they are refused with an error."""

FORBIDDEN = STRIPPED | REFUSED

MAXIMA: Mapping[str, int] = {"n": 128, "best_of": 128, "logprobs": 100, "top_logprobs": 100}
"""The largest number that a field may contain. OpenAI allows n up to 128 and top_logprobs up to 20; vLLM has the same defaults."""

TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The fields by which a client limits a response, in the order of precedence in vLLM."""

_CHOICE_FIELDS = ("n", "best_of")

NUMBERS = frozenset({*MAXIMA, *TOKEN_LIMITS})
"""The fields that may have a largest number."""

OLD_NAMES: Mapping[str, tuple[str, ...]] = {
    "structured_outputs": ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "tools": ("functions",),
    "tool_choice": ("function_call",),
}
"""Fields whose older names clients still use."""

_GRAMMARS = ("response_format", "structured_outputs", *OLD_NAMES["structured_outputs"], "text", "output_config")
"""Fields with a grammar: ``text`` in /v1/responses, ``output_config`` in /v1/messages."""

SIZES: Mapping[str, int] = (
    dict.fromkeys((*_GRAMMARS, "chat_template_kwargs"), 128 * 1024)  # OpenAI takes schemas of up to 120,000 characters
    | dict.fromkeys(("tools", *OLD_NAMES["tools"]), 1024 * 1024)
)
"""Maximum bytes of JSON in a field that is compiled into a grammar or read by a template."""
_SMALLEST_SIZE = min(SIZES.values())
_VALUES_PER_STEP = 4_000
_INTEGERS = frozenset({int})

MAX_BATCH = 2048
"""Maximum number of texts or lists in one list: each is a separate request for the engine. OpenAI's limit for embeddings."""

BATCHES = frozenset({"data_1", "data_2", "documents", "inputs", "items", "prompt", "prompt_embeds", "queries", "text_1", "text_2"})
"""Fields whose items, or the items of the ``content`` of an object, are such requests, unless they are numbers (a prompt of tokens)."""

ECHO = "echo"
"""With this field, vLLM treats ``logprobs`` as ``prompt_logprobs`` (``to_sampling_params`` in its protocol.py of chat and completions)."""

_TEMPLATE = "chat_template_kwargs"
IN_TEMPLATE = frozenset({"chat_template", "tokenize"})
"""Fields that ``chat_template_kwargs`` may not contain, in addition to the table (vLLM's advisory on CVE-2025-62426)."""

NO_MEDIA = frozenset({*SIZES, "tool_choice", "metadata", "logit_bias", "stream_options"})
"""Fields in which nothing is a media part of a message, such as schemas."""


class BodyPolicy:
    """The table for one model, with the operator's own fields."""

    def __init__(self, rules: BodyRules, defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        allowed = frozenset(rules.allow)
        refused = frozenset(each for name in rules.refuse for each in (name, *OLD_NAMES.get(name, ())))
        self.defaults = defaults
        self.overrides = overrides
        self.sets_fields = bool(defaults or overrides)
        self.max_tokens = rules.max_tokens
        self._refused = (REFUSED - allowed) | refused
        maximum = {name: value for name, value in MAXIMA.items() if name not in allowed}
        if rules.max_n is not None:
            maximum |= dict.fromkeys(_CHOICE_FIELDS, rules.max_n)
        if rules.max_tokens is not None:
            maximum |= dict.fromkeys(TOKEN_LIMITS, rules.max_tokens)
        self._maxima = {name: value for name, value in maximum.items() if name not in refused}
        self._forbidden = (STRIPPED - allowed) | self._refused
        self._watched = self._forbidden | self._maxima.keys() | {_TEMPLATE} | ({ECHO} if "prompt_logprobs" in self._refused else set())
        self._in_template = (IN_TEMPLATE - allowed) | self._forbidden
        self._sizes = {name: size for name, size in SIZES.items() if name not in allowed}
        self._allowed = allowed
        self._media = MediaHosts(rules.media_hosts)

    @classmethod
    def for_model(cls, model: Model) -> BodyPolicy:
        """Return the policy of a model of the snapshot."""
        return cls(model.body, model.defaults, model.overrides)

    def apply(self, document: Document, size: int, *, large: bool) -> Generator[None, None, InlineMedia]:
        """Strip and check a client's merged body of ``size`` bytes. Returns the media in it. Raises Refusal for a forbidden field or value.

        ``large``: the work is interrupted often, also between two fields.
        """
        if not self._watched.isdisjoint(document):
            self._check_fields(document)
        if size > _SMALLEST_SIZE:
            for name in self._sizes.keys() & document.keys():
                yield
                if len(orjson.dumps(document[name])) > self._sizes[name]:
                    raise invalid_value(f"The field '{name}' is larger than {self._sizes[name]} bytes.", param=name)
            yield
        media = InlineMedia()
        for name, value in document.items():
            if type(value) in CONTAINERS and name not in NO_MEDIA:
                if name in BATCHES or len(value) > MAX_BATCH:
                    self._check_batch(name, value)
                pending = [value]
                while pending:
                    if (found := refused_url_field(pending, self._media, media, _VALUES_PER_STEP)) is not None:
                        holder, field = found
                        raise self._not_allowed(f"{name}.{path_to(value, holder)}{field}")
                    if large:
                        yield
        return media

    def forbidden_field(self, names: Set[str]) -> str | None:
        """Return a forbidden field of a form; None if all are allowed. Nothing is stripped from a form, which is streamed on."""
        return min(self._forbidden & names, default=None)

    def check_images(self, images: Any) -> None:
        """Check the URLs of ``images`` in a request of Cohere's API. Raises Refusal."""
        for at, url in enumerate(images if isinstance(images, list) else ()):
            if not isinstance(url, str) or not self._media.allows(url):
                raise self._not_allowed(f"images.{at}")

    def _not_allowed(self, path: str) -> Refusal:
        hosts = _allowed(self._media.listed)
        return invalid_value(f"The URL in '{path}' is not allowed. {hosts}", param=path, detail=hosts)

    def maximum(self, name: str) -> int | None:
        """Return the largest number that a field may contain, if there is a limit."""
        return self._maxima.get(name)

    def _check_fields(self, document: Document) -> None:
        for name in self._watched & document.keys():
            value = document[name]
            if name == _TEMPLATE and name not in self._refused:
                self._check_template(value)
                continue
            if name in self._maxima:
                if value is not None:
                    self._check_number(name, value, document)
                continue
            if name == ECHO and name not in self._refused:
                _check_echo(document)
                continue
            if name in self._refused and value is not None and value is not False:
                raise invalid_value(f"The field '{name}' is not allowed here.", param=name)
            del document[name]

    def _check_number(self, name: str, value: Any, document: Document) -> None:
        check_number(name, value, self._maxima[name])
        if name in _CHOICE_FIELDS and value * _batch_size(document.get("prompt")) > MAX_BATCH:
            raise invalid_value(f"The fields '{name}' and 'prompt' request more than {MAX_BATCH} choices.", param=name)

    def _check_batch(self, name: str, value: Any) -> None:
        many = _batch_size(value) > MAX_BATCH if name in BATCHES else type(value) is list and type(value[0]) in (str, list)
        if many and name not in self._allowed:
            raise invalid_value(f"The field '{name}' has more than {MAX_BATCH} items.", param=name)

    def _check_template(self, kwargs: Any) -> None:
        if isinstance(kwargs, dict):
            for name in sorted(self._in_template & kwargs.keys()):
                raise invalid_value(f"The field '{name}' is not allowed here.", param=f"chat_template_kwargs.{name}")


def _check_echo(document: Document) -> None:
    """Refuse a chat request with ``echo`` that would return the log probabilities of its prompt. Raises Refusal.

    For a raw prompt it is part of OpenAI's own API and is allowed.
    """
    if not document[ECHO] or "messages" not in document:
        return
    for name in ("logprobs", "top_logprobs"):
        if document.get(name) is not None and document[name] is not False:
            raise invalid_value(f"The fields '{ECHO}' and '{name}' are not allowed together here.", param=ECHO)
    document["top_logprobs"] = None


_SHOWN_HOSTS = 10


def _allowed(hosts: tuple[str, ...]) -> str:
    """Return a text about the media URLs that a model accepts."""
    if not hosts:
        return "This model takes no media from URLs. Send the media as a 'data:' URL, or ask the operator to allow the host."
    shown = ", ".join(hosts[:_SHOWN_HOSTS]) + (", …" if len(hosts) > _SHOWN_HOSTS else "")
    return f"This model takes media from http and https URLs of these hosts: {shown}. Ask the operator to allow others."


def _batch_size(value: Any) -> int:
    """Return the number of engine requests that a field causes."""
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, list):
        return 1
    return 1 if _INTEGERS.issuperset(map(type, value)) else len(value)


def check_number(name: str, value: Any, maximum: int) -> None:
    """Check that a field is a number from 0 to ``maximum``. vLLM would accept text as a number too. Raises Refusal."""
    if not isinstance(value, int | float):
        raise invalid_value(f"The field '{name}' must be a whole number.", param=name)
    if not 0 <= value <= maximum:
        bounds = f"The field '{name}' must be between {int(name in _CHOICE_FIELDS)} and {maximum}"
        raise invalid_value(f"{bounds}, not {value}.", param=name, detail=f"{bounds}.")
