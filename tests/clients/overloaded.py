"""A server of an overloaded model: it rejects each text on its first request and accepts it on the second.

Speaks just enough of vLLM's wire format: /health, a chat answer, a message; and a 429 with Retry-After, as a proxy says it
in front of a vLLM. It remembers when it was
asked what, which is what the tests of retries judge.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from tests.support.http_server import threaded

TEXT = "Here it is."
LIMITED = {"error": {"message": "Too many requests.", "type": "Too Many Requests", "param": None, "code": 429}}
RETRY_AFTER = "1"
MESSAGE = {
    "id": "chatcmpl-1",
    "type": "message",
    "role": "assistant",
    "model": "busy",
    "content": [{"type": "text", "text": TEXT}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 4},
}
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1760000000,
    "model": "busy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


@dataclass
class Overloaded:
    """The running server. ``request_times``: monotonic times of the requests, in seconds, by the text of the first message."""

    port: int
    request_times: dict[str, list[float]] = field(default_factory=dict)


def _text(body: dict[str, Any]) -> str:
    content = body["messages"][0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@contextmanager
def overloaded() -> Iterator[Overloaded]:
    """Run the server on an ephemeral port, in a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond(200, {"object": "list", "data": []})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            times = state.request_times.setdefault(_text(body), [])
            times.append(time.monotonic())
            if len(times) == 1:
                self._respond(429, LIMITED, {"retry-after": RETRY_AFTER})
            else:
                self._respond(200, MESSAGE if self.path == "/v1/messages" else COMPLETION)

        def _respond(self, status: int, document: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    with serving(Handler) as port:
        state = Overloaded(port)
        yield state


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Run a server in a thread and yield its port. Every connection is closed at the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    with threaded(server):
        yield server.server_port
