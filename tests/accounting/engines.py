"""The launched servers of an accounting run, and what they have recorded and counted themselves.

The rule: counters are read from the server's own metrics, and responses from a recording proxy in front of it, never from the gateway.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import psutil

from tests.accounting.evidence import Tokens
from tests.accounting.http_messages import parse_messages
from tests.accounting.workload import ROUTES
from tests.support.process import Gateway, command_line
from tests.vllm.dialogues import Json

_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_TIMEOUT = 60.0  # seconds of a direct request


@dataclass
class LaunchedEngine:
    """The only server of a launched model. ``recordings``: the folder of the recording proxy in front of it, if it has one."""

    gateway: Gateway
    model: str
    recordings: Path | None = None

    @property
    def name(self) -> str:
        """The name of the server in the ledger."""
        return f"{self.model}#0"

    @property
    def status(self) -> Json:
        """The server's entry in the gateway's status."""
        models = self.gateway.get("/status").json()["models"]
        entry: Json = next(model for model in models if model["id"] == self.model)["servers"][0]
        return entry

    @property
    def is_up(self) -> bool:
        return bool(self.status["condition"] == "up")

    def killer(self, title: str = "") -> Callable[[], None]:
        """Return a function that kills its main process, or the process of a real vLLM with this title."""
        process = psutil.Process(self.status["pid"])
        if title:
            [process] = [each for each in process.children(recursive=True) if f"VLLM::{title}" in " ".join(command_line(each))]
        return process.kill

    def started(self) -> float:
        """Return when its process started, in seconds since the epoch."""
        return float(re.findall(r"^process_start_time_seconds (\S+)$", self._metrics(), re.MULTILINE)[0])

    def counters(self) -> Tokens:
        """Return the tokens that the running engine has counted since its start."""
        text = self._metrics()
        sums = (sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))) for name in _COUNTERS)
        return Tokens(*map(int, sums))

    def is_idle(self) -> bool:
        """Return whether it responds and has no request."""
        with suppress(OSError, http.client.HTTPException, psutil.Error):
            return not self._unfinished()
        return False

    def _unfinished(self) -> bool:
        return any(map(float, re.findall(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", self._metrics(), re.MULTILINE)))

    def _metrics(self) -> str:
        return self._direct("GET", "/metrics").decode()

    def post_directly(self, path: str, body: Json) -> bytes:
        """Return the server's response to a request that bypasses the gateway."""
        return self._direct("POST", path, json.dumps({"model": self.model, **body}))

    def _direct(self, method: str, path: str, body: str | None = None) -> bytes:
        [shim] = [each for each in self.gateway.named("upstream.launcher.shim") if self.model in " ".join(command_line(each))]
        arguments = shim.cmdline()
        key = psutil.Process(self.status["pid"]).environ()["VLLM_API_KEY"]
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(_TIMEOUT)
            connected.connect(arguments[arguments.index("--uds") + 1])
            connection = http.client.HTTPConnection("vllm")
            connection.sock = connected
            connection.request(method, path, body, {"authorization": f"Bearer {key}", "content-type": "application/json"})
            return connection.getresponse().read()

    def recorded(self, since: float) -> dict[str, bytes]:
        """Return the bodies that the server has sent, also truncated ones, by request ID. ``since``: seconds since the epoch."""
        if self.recordings is None:
            return {}
        sources = [(path.stat().st_mtime, path) for path in self.recordings.glob("*.in")]
        return dict(pair for time, path in sorted(sources) if time >= since for pair in _bodies(path))


def _bodies(source: Path) -> Iterator[tuple[str, bytes]]:
    requests = source.read_bytes()
    if b"x-request-id" not in requests.lower():
        return
    for request, response in zip_longest(parse_messages(requests), parse_messages(source.with_suffix(".out").read_bytes())):
        identity = request.headers.get("x-request-id") if request is not None else None
        if request is not None and identity is not None and request.first_line.split()[1].decode() in ROUTES:
            yield identity, b"" if response is None else response.body
