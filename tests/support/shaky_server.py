"""A server that is healthy but serves no request correctly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.http_server import threaded


class Shaky(BaseHTTPRequestHandler):
    """Respond to a connection's first request with a server error. Close it at the next request, as after an idle timeout."""

    protocol_version = "HTTP/1.1"
    failed = False

    def do_GET(self) -> None:
        self._respond(200, {"object": "list", "data": []})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.failed:
            self.close_connection = True
            return
        self.failed = True
        self._respond(500, {"error": {"message": "It failed.", "type": "InternalServerError", "param": None, "code": 500}})

    def _respond(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def shaky_server() -> Iterator[str]:
    """Run the server. Yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shaky)
    with threaded(server):
        yield f"http://127.0.0.1:{server.server_port}"
