"""Keys of another gateway, as entries of this one's configuration. Pure, from the text of a file.

Three forms are known: a key per line; ``id,key`` per line; and LiteLLM's list of keys as JSON (``GET
/key/list?return_full_object=true``), which has SHA-256 hashes already, made as here. The rule: what comes out holds hashes
alone, and no message repeats a key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway import keys

_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_LITELLM_LIMITS = {"rpm_limit": "requests_per_minute", "tpm_limit": "tokens_per_minute", "max_parallel_requests": "concurrent"}
_LITELLM_ALL = {"all-proxy-models", "all-team-models"}


@dataclass(frozen=True, slots=True)
class BadLineError(Exception):
    """The file holds something that is no key; the text says where."""

    words: str

    def __str__(self) -> str:
        return self.words


def entries(text: str) -> list[dict[str, Any]]:
    """The entries that a file's text stands for: ``id``, ``hash`` and what else it says of a key. Raises BadLineError."""
    if text.lstrip()[:1] in ("{", "["):
        return list(_litellm(text))
    return list(_lines(text))


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        identity, comma, token = (part.strip() for part in line.rpartition(","))
        if not line.strip() or line.lstrip().startswith("#") or (number == 1 and token.lower() in ("key", "api_key", "token")):
            continue
        token = token.strip("\"'")
        found = _hash_in(token)
        if found is None:
            raise BadLineError(f"line {number} is no key: expected a key of 1 to 512 visible characters, or id,key")
        yield {"id": identity.strip("\"'") if comma and identity else _name(found), "hash": found}


def _hash_in(token: str) -> str | None:
    """A key's hash; of what is a hash already, that. None for what can be no key."""
    written = re.fullmatch(r"sha256:[0-9a-fA-F]{64}", token)
    if written:
        return token.lower()
    return keys.hash_of(token) if keys.usable(token) else None


def _name(digest: str) -> str:
    return f"imported-{digest.removeprefix('sha256:')[:8]}"


def _litellm(text: str) -> Iterator[dict[str, Any]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise BadLineError("the file begins like JSON and is none") from None
    listed = document.get("keys") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise BadLineError("the JSON has no list of keys")
    for number, one in enumerate(listed):
        yield _litellm_entry(number, {"token": one} if isinstance(one, str) else one)


def _litellm_entry(number: int, one: object) -> dict[str, Any]:
    token = one.get("token") if isinstance(one, dict) else None
    hashed = _HASH.fullmatch(token) if isinstance(token, str) else None
    if not isinstance(one, dict) or hashed is None:
        raise BadLineError(f"key {number} of the JSON has no `token` that is a SHA-256 in hexadecimal digits")
    digest = f"sha256:{hashed[1].lower()}"
    models = [model for model in one.get("models") or [] if model not in _LITELLM_ALL]
    more = {"models": models, "expires": one.get("expires"), "limits": _litellm_limits(one), "revoked": one.get("blocked") is True}
    return {"id": one.get("key_alias") or _name(digest), "hash": digest} | {name: value for name, value in more.items() if value}


def _litellm_limits(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one[theirs] for theirs, name in _LITELLM_LIMITS.items() if one.get(theirs)}
