"""Record a request with its bodies: from here on, everything that is written to its client is also captured.

The rule: the bytes for the client pass unchanged and in the same writes, on the fast path too, because only the connection of the recorded
request is replaced. So no other request has a check for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.client.connection_context import ResponseConnection, ResponseTransport
from gateway.proxy.context import RequestContext
from gateway.proxy.upstream_request import FormBody, UpstreamRequest
from gateway.recording.capture import Capture
from gateway.recording.recorder import HEADER
from gateway.snapshot.snapshot import Key


def start_recording(context: RequestContext, key: Key, body: bytes | bytearray, upstream: UpstreamRequest) -> None:
    """Record a request for a recorded model if it is selected. Its response says so in a header."""
    recorder, request = context.worker.recorder, context.request
    if recorder is None or (selection := recorder.selection) is None or not selection.includes(key, request.id):
        return
    sent = upstream.body
    assert not isinstance(sent, FormBody), "forms are not recorded"
    capture = recorder.start(request.target.route.path, request.received_at, body, sent, len(sent.content))
    if capture is not None:
        context.capture = capture
        request.connection = RecordedConnection(request.connection, capture)
        request.extra_headers += HEADER


class RecordedTransport:
    """Writes to a transport and captures what is written."""

    def __init__(self, transport: ResponseTransport, capture: Capture) -> None:
        self._transport = transport
        self._capture = capture

    def write(self, data: Any) -> None:
        """Send bytes."""
        self._transport.write(data)
        self._capture.write(data)

    def write_at_once(self, data: bytes) -> None:
        """Send bytes before those of other connections."""
        self._transport.write_at_once(data)
        self._capture.write(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send several pieces of bytes."""
        for data in list_of_data:
            self.write(data)


class RecordedConnection:
    """The client connection of a recorded request. Everything but its transport is the connection's."""

    def __init__(self, connection: ResponseConnection, capture: Capture) -> None:
        self.worker = connection.worker
        self.transport = RecordedTransport(connection.transport, capture)
        self.flow = connection.flow
        self.address = connection.address
        self.proxied = connection.proxied
        self.client_of = connection.client_of
        self.response_finished = connection.response_finished
        self.cut = connection.cut
