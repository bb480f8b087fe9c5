"""The streams of OpenAI's APIs: each event is a JSON document, and [DONE] is the last one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from upstream.simulator.engine.job import ResponseShape
from upstream.simulator.errors import ApiError

DONE = b"data: [DONE]\n\n"


def frame(event: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


class StreamShape(ResponseShape):
    """The shapes of a response whose stream has these events."""

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        return refusal.event(), DONE
