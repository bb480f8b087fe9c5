"""Write the error for a path that is not served: the reason, and the mistake in a base URL that leads to it. Pure.

The rule: the text depends only on the path and public tables, never on the configuration. So the response does not tell an unauthenticated
client which models exist. Quoted parts of the path are bounded and visible ASCII.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

from gateway.api.errors import Refusal
from gateway.api.routes import REFUSED, ROUTES

LONGEST = 200
"""Maximum characters of a path in a message."""

_VISIBLE = string.punctuation  # including the percent sign: the path is shown as sent
_MAY_BE_A_KEY = re.compile(r"sk-[^/]+|[^/]{65,}")
_LISTED = frozenset({*ROUTES, "/v1/models"})
_NAME = re.compile(r"\\{\w+\\}")  # a parameter of a path, as re.escape writes it
_PATTERNS = tuple((re.compile(_NAME.sub("[^/]+", re.escape(path))), path) for path in sorted(REFUSED, key=lambda path: "{" in path))
_OLLAMA = "This is a path of Ollama's API. Use an OpenAI client with a base URL that ends in /v1."
_NOT_IN_VLLM = "vLLM does not have this part of the API."

OTHER_APIS: Mapping[str, str] = {
    "/openai/deployments": "This is a path of Azure's API. Use an OpenAI client with a base URL that ends in /v1.",
    **dict.fromkeys(("/api/chat", "/api/embed", "/api/embeddings", "/api/generate", "/api/show", "/api/tags"), _OLLAMA),
    **dict.fromkeys(
        (
            "/v1/assistants",
            "/v1/audio/speech",
            "/v1/batches",
            "/v1/conversations",
            "/v1/files",
            "/v1/fine_tuning",
            "/v1/images",
            "/v1/messages/batches",
            "/v1/moderations",
            "/v1/threads",
            "/v1/vector_stores",
        ),
        _NOT_IN_VLLM,
    ),
}
"""Paths of other APIs, including everything below them, and the advice for each."""


def unserved(method: str, path: str) -> Refusal:
    """Return the error for a path that is not served. ``path`` is as sent, without the query."""
    splits = tuple(_splits(path.removesuffix("/"))) if len(path) <= LONGEST else ()
    if (known := _of_vllm(splits)) is not None:
        refused_method, reason = REFUSED[known]
        return Refusal("not_found", f"The route {refused_method} {known} of vLLM is not served by this gateway: {reason}.")
    message = f"There is no route {shown(method)} {shown(path)}."
    advice = _advice(splits)
    return Refusal("not_found", message if advice is None else f"{message} {advice}")


def shown(text: str) -> str:
    """Return a client's text for a message or the log: visible ASCII, at most ``LONGEST`` characters, without possible keys."""
    text = _MAY_BE_A_KEY.sub("...", quote(text, safe=_VISIBLE, encoding="latin-1", errors="replace"))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _splits(path: str) -> Iterator[tuple[str, str]]:
    """Yield the path split before each of its slashes, the longest second part first."""
    return ((path[:at], path[at:]) for at, letter in enumerate(path) if letter == "/")


def _of_vllm(splits: Iterable[tuple[str, str]]) -> str | None:
    """Return the refused route of vLLM at this path, or at this path after a prefix such as a mount."""
    for prefix, rest in splits:
        for pattern, known in _PATTERNS:
            if pattern.fullmatch(rest) and (not prefix or known.startswith("/v1/")):
                return known
    return None


def _advice(splits: Iterable[tuple[str, str]]) -> str | None:
    """Return what to change in the base URL, or which other API the path belongs to."""
    for prefix, rest in splits:
        if rest in _LISTED:
            return f"{_change(prefix, rest)}: the route is {rest}."
        if f"/v1{rest}" in _LISTED:
            return f"{'The base URL must end in /v1' if prefix else 'Add /v1 to the base URL'}: the route is /v1{rest}."
    below = (prefix or rest for prefix, rest in reversed([*splits]))
    return next((OTHER_APIS[path] for path in below if path in OTHER_APIS), None)


def _change(prefix: str, route: str) -> str:
    """Return what to do about a prefix before a route."""
    if prefix.endswith("/v1") and route.startswith("/v1/"):
        return "Remove one /v1 from the base URL"
    if prefix.endswith("/"):
        return "Remove the slash at the end of the base URL"
    return f"Remove {shown(prefix)} from the base URL"
