"""Continue a completion on another server: the tokens of the prompt and of the response so far are its prompt. Sans-I/O.

The rule: a completion continues after the last event with a text. If the prompt ended in the middle of a character, vLLM would return
text of the prompt (docs/continuation.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.continuation.events import event, usage_of
from gateway.continuation.token_record import TokenRecord
from upstream.http.sse import Splitter, data_of, split

DEFAULT_LIMIT = 16
"""The ``max_tokens`` of vLLM's sampling parameters, and of a completion without it. ``render`` omits this value."""


def remaining(limits: Mapping[str, Any], made: int) -> dict[str, Any]:
    """Return the limits for the tokens after the first ones. ``limits``: those for all."""
    most, least = limits.get("max_tokens"), limits.get("min_tokens")
    rest = {"max_tokens": (most if isinstance(most, int) else DEFAULT_LIMIT) - made}
    return {**rest, "min_tokens": max(least - made, 0)} if isinstance(least, int) else rest


class ContinuedCompletion:
    """The rest of one completion. ``limit``: bytes of an incomplete event that may be held."""

    def __init__(self, record: TokenRecord, document: Mapping[str, Any], limit: int) -> None:
        record.keep_shown()
        self._record = record
        self._made = len(record.ids)
        self._document = document
        self._splitter = Splitter(limit)

    def body(self, model: str) -> bytes:
        """Return the request for a server that knows the model by this name."""
        return orjson.dumps(
            {
                **self._document,
                "model": model,
                "prompt": [*self._record.prompt, *self._record.ids],
                **remaining(self._document, self._made),
            }
        )

    def feed(self, data: bytes) -> bytes:
        """Return the events for bytes of the other server's stream, as the lost server would have sent them. Raises EventTooLongError."""
        return b"".join(map(self._continued, split(self._splitter.feed(data))))

    def _continued(self, received: bytes) -> bytes:
        data = data_of(received)
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            return received
        if not isinstance(document, dict) or "choices" not in document:
            return received
        document.update(self._record.head)
        usage = document.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            document["usage"] = usage_of(self._record.prompt_size, self._made + usage["completion_tokens"])
        return event(document)
