"""Requests that an ASGI application serves: every route that is not inference (ASGI 3.0, HTTP messages of version 2.3).

Only the routes of the sign-in and of self-service read a body, a small one. All other bodies are received and discarded. The rules: a
response starts once and ends once; an application that fails before its response has started is answered with 500; a response that it
leaves unfinished is cut, so that the client does not treat it as complete.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from urllib.parse import unquote

import httptools

from gateway.api.errors import Refusal, draining, internal_error
from gateway.client.connection_context import Application, Connection, Message
from gateway.client.http.head import RequestHead
from gateway.client.http.status_lines import STATUS_LINES
from gateway.self_service import paths as self_service
from gateway.sign_in import paths as sign_in
from gateway.sign_in.paths import MAX_FORM

_NOT_IN_A_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_NOT_IN_A_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_A_BODY = frozenset({204, 304})
_log = logging.getLogger("vllm_gateway.worker")


class AsgiRequest:
    """One request between its connection and the application. It receives the request's body, too.

    Raises Refusal if the request target is not a path.
    """

    is_awaited = False

    def __init__(self, connection: Connection, head: RequestHead, keep_alive: bool) -> None:
        self.head = head
        self.keep_alive = keep_alive
        self.size = 0
        self.body_complete = False
        self._scope = _scope(connection, head)
        self._body = b"" if _reads_body(self._scope["raw_path"].decode("latin-1")) else None
        """The start of the body, enough to detect a body that is too large. None for a route that reads no body."""
        self.response_complete = False
        self.disconnected = False
        self.bytes_out = 0
        self._connection = connection
        self._changed = asyncio.Event()
        self._body_reported = False
        # The response
        self._pending: bytes | None = None
        """The status line and headers, until they are sent with the first bytes of the body."""
        self._started = False
        self._chunked = False
        self._length: int | None = None
        """Number of body bytes that are not sent yet; None if no length was declared."""

    async def run(self, application: Application) -> None:
        """Run the application, and complete the response if it does not."""
        try:
            await application(self._scope, self.receive, self.send)
        except asyncio.CancelledError:  # the worker's drain has timed out
            self._end_with(draining())
        except Exception:  # noqa: BLE001  the outer edge: the client gets a response, the operator the trace
            if self.response_complete:
                return  # Starlette raises an error again that it has answered and logged
            _log.exception("the application failed on %s", self.head.method.decode())
            self._end_with(internal_error())
        else:
            if not (self.response_complete or self.disconnected):
                _log.error("the application sent no complete response on %s", self.head.method.decode())
                self._end_with(internal_error())

    # For the parser and the connection

    def feed(self, data: bytes) -> None:
        """Store the next bytes of a small body, or discard those of another one."""
        self.size += len(data)
        if self._body is not None and len(self._body) <= MAX_FORM:
            self._body += data[: MAX_FORM + 1 - len(self._body)]

    def finish(self) -> None:
        """Note that all of the body has been received."""
        self.body_complete = True
        self._changed.set()
        if self.response_complete and not self.keep_alive:
            self._connection.close()

    def fail(self, refusal: Refusal) -> None:  # noqa: ARG002  the response is the application's
        """Close the connection after the response, because the rest of the body is not valid HTTP."""
        self.keep_alive = False
        if self.response_complete:
            self._connection.linger()

    def disconnect(self) -> None:
        """Note that the client has disconnected."""
        self.disconnected = True
        self._changed.set()

    def pause(self) -> None:
        """Note that the client reads slowly: ``send`` waits."""

    resume = pause

    # ASGI

    async def receive(self) -> Message:
        """Return ``http.request`` with the stored body after the whole body was received. Then wait, and return ``http.disconnect``."""
        while not (self.disconnected or self.response_complete):
            if self.body_complete and not self._body_reported:
                self._body_reported = True
                return {"type": "http.request", "body": self._body or b"", "more_body": False}
            self._changed.clear()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the start of the response, or a part of its body. Raises RuntimeError for a message that may not be sent now."""
        if not self.disconnected:
            await self._connection.flow.drain()
        if self.disconnected:
            return
        match message["type"]:
            case "http.response.start" if self._pending is None and not self._started:
                self._pending = self._head(message["status"], message.get("headers", ()))
            case "http.response.body" if (self._pending is not None or self._started) and not self.response_complete:
                self._write(message.get("body", b""), last=not message.get("more_body", False))
            case kind:
                raise RuntimeError(f"The application sent '{kind}' out of order.")

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines, closes, length = [STATUS_LINES[status], self._connection.worker.date_line], False, None
        for given, value in headers:
            name = given.lower()
            if _NOT_IN_A_NAME.search(name) or _NOT_IN_A_VALUE.search(value):
                raise RuntimeError(f"The header {name!r} is not valid.")
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive, closes = False, True
            lines.append(b"%b: %b\r\n" % (name, value))
        has_body = self.head.method != b"HEAD" and status not in _WITHOUT_A_BODY
        if has_body and length is None and self.head.http10:
            self.keep_alive = False  # the end of the connection is the end of the body
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if has_body and length is None and not self.head.http10:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        self._length = length
        return b"".join((*lines, b"\r\n"))

    def _write(self, body: bytes, *, last: bool) -> None:
        if self.head.method == b"HEAD":
            body = b""
        elif self._length is not None:
            self._length -= len(body)
            if self._length < 0 or (last and self._length):
                raise RuntimeError("The body is not as long as its Content-Length.")
        self.bytes_out += len(body)
        if self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if last else b"")
        pending, self._pending, self._started = self._pending, None, True
        self._connection.transport.write(body if pending is None else pending + body)
        if last:
            self._complete()

    def _end_with(self, refusal: Refusal) -> None:
        """End a response that the application has not completed."""
        if self.disconnected or self.response_complete:
            return
        self.keep_alive = False
        if self._started:
            self.response_complete = True
            self._connection.cut()
        else:
            self._connection.write_refusal(refusal, with_body=self.head.method != b"HEAD")
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self._changed.set()
        self._connection.response_finished(keep_alive=self.keep_alive, body_complete=self.body_complete)


def _reads_body(path: str) -> bool:
    """Return whether the route of a path reads the body of its requests."""
    return sign_in.endpoint_of(path) is not None or self_service.endpoint_of(path) is not None


def _scope(connection: Connection, head: RequestHead) -> Message:
    """Return the connection scope of a request. Raises Refusal if its target is not a path."""
    if not head.url.startswith((b"/", b"*")):  # in absolute form two parsers could read two hosts
        raise Refusal("invalid_request", "The target of a request is a path.")
    try:
        url = httptools.parse_url(head.url)
        path = url.path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
        raise Refusal("invalid_request", "The request is not valid HTTP/1.1.") from None
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if head.http10 else "1.1",
        "server": connection.server,
        "client": connection.client,
        "scheme": connection.scheme,
        "method": head.method.decode("ascii"),
        "root_path": "",
        "path": unquote(path) if "%" in path else path,
        "raw_path": url.path,
        "query_string": url.query or b"",
        "headers": head.fields,
        "state": {},
    }
