"""Run the gateway as an operator does, with a real vLLM that it launches and a recording proxy in front of vLLM (tee.py).

Owns what a test reads of all three: the client's side, what the server itself sent, and the server's own counts.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import psutil

from tests.accounting.client import USER_HEADER
from tests.support import process
from tests.support.process import Gateway, configuration
from tests.support.running import KEY
from tests.vllm import tee
from tests.vllm.dialogues import Json, user
from tests.vllm.server import COMMAND, START_WITHIN, Flag, launch, process_of

MODEL, ALIAS = "tests/tiny", "little"
PYTHON = str(COMMAND.with_name("python"))
LEDGER = "sqlite:///usage.db"
WITHOUT_THINKING: Json = {"chat_template_kwargs": {"enable_thinking": False}}
BURST, PAUSE, BURSTS = 0.05, 0.3, 100  # seconds in which the engine may generate some 20 tokens, and in which they may be sent
GENERATED = "vllm:generation_tokens_total"
ATTEMPTS = 10
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


T = TypeVar("T")
WorkUntil = Callable[[Callable[[], bool]], None]


class NotAchieved(Exception):
    """The situation that a test needs did not occur, for example because the engine was faster than the client."""


def attempted(scenario: Callable[[int], T]) -> T:
    """Run a scenario up to ``ATTEMPTS`` times while it raises NotAchieved. It gets the number of the attempt.

    Raises:
        NotAchieved: no attempt achieved the situation.
    """
    for attempt in range(ATTEMPTS - 1):
        with suppress(NotAchieved):
            return scenario(attempt)
    return scenario(ATTEMPTS - 1)


@contextmanager
def held(worker: psutil.Process) -> Iterator[WorkUntil]:
    """Stop vLLM's worker process in the `with` block. The yielded function lets it work in bursts until a condition holds.

    On two cores vLLM's busy engine starves its own API server: a whole response of 1900 tokens, six seconds of work, may be
    generated before its first byte is sent. On a machine that is busy otherwise that may even happen within one burst (NotAchieved).
    """

    def work_until(condition: Callable[[], bool]) -> None:
        bursts = iter(range(BURSTS))
        while not condition():
            assert next(bursts, None) is not None, "the engine works, and the condition does not come true"
            worker.resume()
            time.sleep(BURST)
            worker.suspend()
            time.sleep(PAUSE)

    worker.suspend()
    try:
        yield work_until
    finally:
        with suppress(psutil.NoSuchProcess):
            worker.resume()


def finished_requests(metrics: str) -> float:
    """Count the POST requests that vLLM's API server has finished, aborted ones included, from the text of its metrics."""
    lines = metrics.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("http_requests_total{") and 'method="POST"' in line)


def real_model(identity: str, folder: Path, flags: Mapping[str, Flag] | None = None) -> Json:
    """Return a model whose launch is the real vLLM behind a tee that writes to `folder`; for `flags` see `launch`."""
    settings = launch("qwen3", flags)
    settings["command"] = [PYTHON, tee.__file__, str(folder), *settings["command"]]
    settings["env"]["TMPDIR"] = str(folder)  # vLLM's processes leave sockets there when they are killed
    settings["env"]["TORCH_COMPILE_DISABLE"] = "1"  # the first request for logprobs would wait 15 s for a compiler
    return {"id": identity, "aliases": [ALIAS], "launch": settings}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One exchange at the server: the request's headers and body, and the response's body, without HTTP framing."""

    headers: Mapping[str, str]
    request: bytes
    output: bytes


@dataclass
class Real:
    """A running gateway and its real vLLM."""

    gateway: Gateway
    folder: Path

    # The client's side

    def post(self, path: str, body: Json) -> httpx2.Response:
        """Send a request with the key. `model` is added if the body has no model."""
        return httpx2.post(self.gateway.url + path, json={"model": MODEL, **body}, headers=HEADERS, timeout=120)

    def sdk(self) -> openai.OpenAI:
        """Return a client of OpenAI's SDK without retries."""
        return openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    def tokens(self, kind: str) -> float:
        """Return the gateway's count of the key's tokens."""
        return self.gateway.metric(f'vllm_gateway_tokens_total{{key="team-a",model="{MODEL}",type="{kind}"}}')

    # The server's side

    def recorded(self, response: httpx2.Response) -> Recorded:
        """Return the bytes between gateway and server for the request of this response."""
        found: Recorded = process.wait_for(lambda: self._found(response.headers["x-request-id"]))
        return found

    def reached_the_server(self, response: httpx2.Response) -> bool:
        """Return whether the server received this request (it is recorded before its response arrives)."""
        return self._found(response.headers["x-request-id"]) is not None

    def recorded_bytes(self, identity: str) -> bytes:
        """Return what the server has sent for the last request of a connection, by the request's ID, also if it was truncated."""
        for source in self.folder.glob("*.in"):
            if f"x-request-id: {identity}".encode() in source.read_bytes():
                return source.with_suffix(".out").read_bytes().rpartition(b"HTTP/1.1 200")[2]
        return b""

    def _found(self, identity: str) -> Recorded | None:
        return next((each for each in self._exchanges() if each.headers.get("x-request-id") == identity), None)

    def count(self, name: str) -> float:
        """Return the sum of one of vLLM's own metrics."""
        lines = self._direct("GET", "/metrics").decode().splitlines()
        samples = [line for line in lines if line.startswith(name + "{")]
        assert samples, f"vLLM has no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def post_directly(self, path: str, body: Json) -> Any:
        """Return vLLM's own response, without the gateway and the tee."""
        return json.loads(self.bytes_directly(path, {"model": MODEL, **body}))

    def bytes_directly(self, path: str, body: Json) -> bytes:
        """Return the bytes of vLLM's own response, without the gateway and the tee."""
        headers = {"authorization": f"Bearer {self.internal_key}", "content-type": "application/json"}
        return self._direct("POST", path, json.dumps(body), headers)

    @property
    def status(self) -> Json:
        """The server's entry in the gateway's status."""
        status: Json = self.gateway.get("/status").json()["models"][0]["servers"][0]
        return status

    @property
    def api_server(self) -> psutil.Process:
        """vLLM's main process."""
        return psutil.Process(self.status["pid"])

    def shim(self) -> psutil.Process:
        """Return the process between control and vLLM. All vLLM processes descend from it."""
        [shim] = [each for each in self.gateway.named("upstream.launcher.shim") if MODEL in " ".join(process.command_line(each))]
        return shim

    def process(self, title: str) -> psutil.Process:
        """Return another vLLM process: `EngineCore` or `Worker`."""
        return process_of(self.api_server, title)

    def held(self) -> AbstractContextManager[WorkUntil]:
        """Stop the engine, and let it work in bursts; see ``held``."""
        return held(self.process("Worker"))

    def disconnect_in_mid_response(self, disconnect: Callable[[WorkUntil], T], tokens: int, gateway: Gateway | None = None) -> T:
        """Disconnect clients while the engine is stopped. Return when the API server has finished all requests that arrived.

        ``disconnect`` returns when its clients have disconnected. ``tokens``: of the complete responses. ``gateway``: the gateway that
        the clients use, by default this gateway.

        Raises:
            NotAchieved: the engine had generated all tokens before the clients disconnected.
        """
        source = gateway or self.gateway
        generated, arrived, finished = self.count(GENERATED), self.arrived(), self.finished()
        with self.held() as work_until:
            result = disconnect(work_until)
            process.wait_for(lambda: source.metric(f'vllm_gateway_inflight_requests{{model="{MODEL}"}}') == 0)
            process.wait_for(lambda: self.finished() - finished == self.arrived() - arrived)
            complete = self.count(GENERATED) - generated >= tokens
        if complete:
            process.wait_for(lambda: self.count("vllm:num_requests_running") == 0)
            raise NotAchieved
        return result

    def arrived(self) -> int:
        """Return the number of POST requests that the tee has passed to the server."""
        return sum(path.read_bytes().count(b"POST /") for path in self.folder.glob("*.in"))

    def finished(self) -> float:
        """Return the number of POST requests that the server has finished, including those of disconnected clients."""
        return finished_requests(self._direct("GET", "/metrics").decode())

    def wait_until_up(self) -> None:
        process.wait_for(lambda: self.status["condition"] == "up", START_WITHIN, why=lambda: self.gateway.output[-4000:])

    @property
    def internal_key(self) -> str:
        """The key that the gateway passed to its server."""
        return self.api_server.environ()["VLLM_API_KEY"]

    def _direct(self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(60)
            connected.connect(str(self.folder / tee.INNER))
            connection = http.client.HTTPConnection("vllm")
            connection.sock = connected
            connection.request(method, path, body, headers or {})
            return connection.getresponse().read()

    def _exchanges(self) -> Iterator[Recorded]:
        for source in sorted(self.folder.glob("*.in"), key=lambda path: path.stat().st_mtime, reverse=True):
            yield from _parsed(source.read_bytes(), source.with_suffix(".out").read_bytes())


HEADERS = {"authorization": f"Bearer {KEY}"}


@contextmanager
def real_gateway(folder: Path, *others: Json, flags: Mapping[str, Flag] | None = None) -> Iterator[Real]:
    """Run the gateway until its real vLLM is healthy, then yield. `others`: more models. No process is left at the end."""
    with tempfile.TemporaryDirectory(prefix="tee-") as recordings:  # a short path: unix sockets allow 107 bytes
        config = configuration(real_model(MODEL, Path(recordings), flags), *others) | {"ledger": LEDGER}
        config["keys"][0]["user_header"] = USER_HEADER
        with process.gateway(folder, config, seconds=START_WITHIN) as gateway:
            yield Real(gateway, Path(recordings))


# The bytes of a connection


def _parsed(source: bytes, received: bytes) -> Iterator[Recorded]:
    """Yield the exchanges of one connection in order. Exchanges with a truncated response are omitted."""
    responses = _Responses(received)
    for headers, body in _requests(source):
        response = responses.next()
        if response is None:
            return
        yield Recorded(headers, body, response)


def _requests(data: bytes) -> Iterator[tuple[dict[str, str], bytes]]:
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        found = _LENGTH.search(head + b"\r\n")
        length = int(found[1]) if found else 0
        lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        yield {name.lower(): value.strip() for name, _, value in lines}, rest[:length]
        data = rest[length:]


class _Responses(io.BytesIO):
    """A recorded connection for the standard library's HTTP client, whose parser differs from the gateway's."""

    def makefile(self, _: str) -> io.BytesIO:
        return self

    def close(self) -> None:
        """Keep the file open. The parser closes it after each response, but the next response is in the same file."""

    def next(self) -> bytes | None:
        response = http.client.HTTPResponse(self)  # type: ignore[arg-type]  # it asks for makefile and nothing else
        try:
            response.begin()
            return response.read()
        except http.client.HTTPException:
            return None


def chat(text: str, **more: Any) -> Json:
    """Return a chat request with one user message, at temperature 0 and without thinking."""
    return {"messages": [user(text)], "temperature": 0, **WITHOUT_THINKING, **more}
