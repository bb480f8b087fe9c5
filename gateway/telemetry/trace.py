"""The trace of a request: its place in it, the header for its server, and whether it is recorded. Pure, apart from random IDs.

The rule: a client's trace is continued (W3C Trace Context), but whether a request is traced is decided here, by the trace ID. So all
participants with the same share make the same decision.
"""

from __future__ import annotations

import os
import re

import msgspec

from gateway.snapshot.snapshot import Tracing

_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_SHARE_OF = 1 << 64


class Trace(msgspec.Struct, frozen=True, gc=False):
    """A request's place in its trace: ids in hexadecimal digits. ``parent``: the client's span."""

    trace_id: str
    span_id: str
    parent: str | None
    sampled: bool

    @property
    def header(self) -> bytes:
        """The header line for the server. A request that is not traced here tells the server not to trace it either."""
        span = self.span_id if self.sampled or self.parent is None else self.parent
        return f"traceparent: 00-{self.trace_id}-{span}-0{int(self.sampled)}\r\n".encode()


class Sampler:
    """Decides which requests are traced, as TraceIdRatioBased of OpenTelemetry's SDKs does."""

    def __init__(self, settings: Tracing) -> None:
        self._bound = round(settings.sample * _SHARE_OF)

    def start_trace(self, traceparent: bytes | None) -> Trace:
        """Return the trace of a request with this header from its client; an invalid header is ignored (Trace Context, 4.3)."""
        given = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
        if given is not None and given[1] == b"00" and given[4]:
            given = None
        digits = os.urandom(24).hex()
        trace_id = given[2].decode() if given else digits[16:]
        sampled = int(trace_id[16:], 16) < self._bound
        return Trace(trace_id, digits[:16], given[3].decode() if given else None, sampled)
