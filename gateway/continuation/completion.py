"""Continue a completion on another server: the tokens of the prompt and of the response so far are its prompt. Sans-I/O.

The rule: a completion continues after a token whose text is complete (``token_record``). If the prompt ended in the middle of a character,
vLLM would return the text of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.continuation.events import event, usage_of
from gateway.continuation.regeneration import DifferentError
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
    """The rest of one completion. ``limit``: bytes of an incomplete event that may be held.

    ``sampled``: the tokens after those of ``record.shown`` are another draw. Otherwise they must be the same, and the text of them that was
    sent is left out. Raises DifferentError if some of that text was sent, and would be another draw.
    """

    def __init__(self, record: TokenRecord, document: Mapping[str, Any], limit: int, *, sampled: bool = False) -> None:
        if sampled:
            if record.surplus:
                raise DifferentError("the text of several tokens may end in a character")
            record.keep_shown()
        self._record = record
        self._made = record.shown
        self._document = document
        self._splitter = Splitter(limit)
        self._again = list(record.ids[self._made :])
        held = record.overlap if self._made and not document.get("include_stop_str_in_output") else 0
        self._sent = record.surplus - held
        """The characters of the text of these tokens that were sent."""

    def body(self, model: str) -> bytes:
        """Return the request for a server that knows the model by this name."""
        return orjson.dumps(
            {
                **self._document,
                "model": model,
                "prompt": [*self._record.prompt, *self._record.ids[: self._made]],
                **remaining(self._document, self._made),
            }
        )

    def feed(self, data: bytes) -> bytes:
        """Return the events for bytes of the other server's stream, as the lost server would have sent them.

        Raises EventTooLongError, and DifferentError for other tokens than those that were sent.
        """
        return b"".join(map(self._continued, split(self._splitter.feed(data))))

    def _continued(self, received: bytes) -> bytes:
        data = data_of(received)
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            return received
        if not isinstance(document, dict) or "choices" not in document:
            return received
        if (self._again or self._sent) and document["choices"] and not self._leave_out(document["choices"][0]):
            return b""
        document.update(self._record.head)
        usage = document.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            document["usage"] = usage_of(self._record.prompt_size, self._made + usage["completion_tokens"])
        return event(document)

    def _leave_out(self, choice: dict[str, Any]) -> bool:
        """Remove what was sent. Returns whether something is left. Raises DifferentError."""
        ids, text = choice.get("token_ids") or [], choice["text"]
        known = min(len(ids), len(self._again))
        if ids[:known] != self._again[:known]:
            raise DifferentError("other tokens")
        del self._again[:known]
        shown = text[self._sent :]
        self._sent = max(self._sent - len(text), 0)
        choice["token_ids"], choice["text"] = ids[known:], shown
        if (ids[known:] and not self._sent) or choice.get("finish_reason") == "abort":
            return True
        if ids[known:] or shown or choice.get("finish_reason") is not None:
            raise DifferentError("another text")
        return False
