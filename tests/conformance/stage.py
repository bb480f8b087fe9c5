"""The gateway as these tests meet it: one process, the models of the documents, and vLLM servers that it launches itself.

A stage is a gateway with the servers of one kind behind it: ``simulator`` has all models, ``qwen``, ``llama`` and ``pooling`` one real
vLLM each. The rule: tests that run on several stages are the same tests, and whatever is asked and answered by ``post`` and ``curl`` is
what the API reference says.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from gateway.api.routes import ROUTES
from gateway.auth import keys
from tests.conformance.examples import ALIASES, CHAT, KEY, LLAMA, MOUNT, QWEN, Json
from tests.support.described import request_problems, response_problems
from tests.support.process import SIMULATOR, Gateway, command_line, configuration, gateway, wait_for
from tests.vllm.chat import events
from tests.vllm.dialogues import Architecture
from tests.vllm.gateway import WorkUntil, finished_requests, held
from tests.vllm.server import NOT_INSTALLED, PARSERS, POOLING, START_WITHIN, Flag, installed, launch

REAL = ("qwen", "llama", "pooling")
NAMES: Json = {QWEN: {"aliases": ["qwen"]}, LLAMA: {"aliases": ALIASES, "mounts": [MOUNT]}}
_UDS = "--uds"
_NO_TLS = False  # everything is plain HTTP on this machine, and each client would read the certificates for 100 ms


@dataclass(frozen=True, slots=True)
class Stage:
    """A running gateway, and the model that a test asks when it does not care."""

    name: str
    gateway: Gateway
    model: str

    @property
    def real(self) -> bool:
        return self.name in REAL

    def client(self, key: str | None = KEY) -> httpx2.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=self.gateway.url, headers=headers, timeout=120, verify=_NO_TLS)

    def post(self, body: Json, path: str = CHAT, key: str | None = KEY) -> httpx2.Response:
        """A JSON request; `model` is set where the body has none, and left out where it is None."""
        document = {name: value for name, value in {"model": self.model, **body}.items() if (name, value) != ("model", None)}
        with self.client(key) as client:
            response = client.post(path, json=document)
        _hold(path, document, response.status_code, response.headers["content-type"], response.text)
        return response

    def chunks(self, body: Json, path: str = CHAT, key: str | None = KEY) -> list[Any]:
        """The events of a streamed answer."""
        response = self.post({**body, "stream": True}, path, key)
        assert response.status_code == 200, response.text
        return events(response.text)

    def content(self, body: Json) -> str:
        """The words of a whole answer."""
        response = self.post(body)
        assert response.status_code == 200, response.text
        output: str = response.json()["choices"][0]["message"]["content"]
        return output

    def sdk(self, mount: str = "", key: str = KEY) -> openai.OpenAI:
        """OpenAI's client; it does not try again by itself."""
        plain = httpx2.Client(timeout=120, verify=_NO_TLS)
        return openai.OpenAI(base_url=f"{self.gateway.url}{mount}/v1", api_key=key, max_retries=0, http_client=plain)

    def curl(self, path: str, data: bytes, key: str | None, accept: str) -> tuple[int, dict[str, str], str]:
        """Send what ``curl -d`` sends, without a library's headers. Return status, headers and text of the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.data, timeout=120)
        headers = {"User-Agent": "curl/8.5.0", "Accept": accept, "Content-Type": "application/json", "Content-Length": str(len(data))}
        try:
            connection.putrequest("POST", path, skip_accept_encoding=True)
            for name, value in (headers | ({} if key is None else {"Authorization": f"Bearer {key}"})).items():
                connection.putheader(name, value)
            connection.endheaders(data)
            response = connection.getresponse()
            reported, text = {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
            _hold(path, json.loads(data), response.status, reported["content-type"], text)
            return response.status, reported, text
        finally:
            connection.close()

    # Behind the gateway

    def api_server(self, model: str | None = None) -> psutil.Process:
        """The main process of a launched server."""
        status = httpx2.get(f"http://127.0.0.1:{self.gateway.admin}/status", timeout=60, verify=_NO_TLS).json()
        shown = next(each for each in status["models"] if each["id"] == (model or self.model))
        return psutil.Process(shown["servers"][0]["pid"])

    def held(self, model: str) -> AbstractContextManager[WorkUntil]:
        """Stop a real engine, or let it work in bursts. A simulator is not stopped: a test sets its pace."""
        if not self.real:
            return nullcontext(wait_for)
        [worker] = [each for each in self.api_server(model).children(recursive=True) if "VLLM::Worker" in " ".join(command_line(each))]
        return held(worker)

    @contextmanager
    def directly(self, model: str | None = None) -> Iterator[httpx2.Client]:
        """A client of the launched server itself, on its unix socket and with its internal key."""
        server = self.api_server(model)
        arguments = server.cmdline()
        transport = httpx2.HTTPTransport(uds=arguments[arguments.index(_UDS) + 1], verify=_NO_TLS)
        headers = {"authorization": f"Bearer {server.environ()['VLLM_API_KEY']}"}
        with httpx2.Client(transport=transport, base_url="http://vllm", headers=headers, timeout=120) as client:
            yield client

    def arrived(self, response: httpx2.Response) -> Json:
        """The request at the simulator that this is the answer to: its `path` and `body`."""
        identity = response.headers["x-request-id"]
        for model in (LLAMA, QWEN):
            with self.directly(model) as client:
                for entry in client.get("/sim/requests").json():
                    if ["x-request-id", identity] in entry["headers"]:
                        found: Json = entry
                        return found
        raise AssertionError("it did not reach a server")

    def count(self, name: str, model: str | None = None) -> float:
        """The sum of one of the server's own metrics."""
        with self.directly(model) as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def finished(self, model: str) -> float:
        """Count the POST requests that a real server has finished, including those of disconnected clients."""
        with self.directly(model) as client:
            return finished_requests(client.get("/metrics").text)


def _hold(path: str, body: Json, status: int, media_type: str, text: str) -> None:
    """Hold a request that was served, and any answer, to the API reference. Routes that do not exist have none."""
    if path.startswith(MOUNT):  # where the model may be left out
        path, body = path.removeprefix(MOUNT), {"model": "-", **body}
    if path not in ROUTES:
        return
    problems = response_problems(path, status, media_type, text)
    if status == 200:
        problems += request_problems(path, body)
    assert problems == []


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on these stages."""
    marks = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]
    real = [pytest.param(name, marks=marks, id=f"@{name}") for name in names if name in REAL]
    return pytest.mark.parametrize("stage", [*(name for name in names if name not in REAL), *real], indirect=True)


@contextmanager
def staged(name: str, folder: Path) -> Iterator[Stage]:
    """A stage, from its first healthy answer; in the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="stage-") as scratch:
        models = _MODELS[name](scratch)
        keyed: list[Json] = [{"id": "hexgrid", "hash": keys.hash_of(KEY)}]
        unkeyed: list[Json] = [{"id": "nobody", "anonymous": True, "models": [LLAMA]}] if models[0]["id"] == LLAMA else []
        config = {**configuration(*models), "keys": keyed + unkeyed}
        with gateway(folder, config, seconds=START_WITHIN) as running:
            yield Stage(name, running, models[-1]["id"])


def simulated(identity: str, architecture: Architecture) -> Json:
    """A model that is launched as a simulator, with the flags that the documents name."""
    flags = {**PARSERS[architecture], "max-model-len": 2048, "sim-tokens-per-second": 0, "sim-tokens": 32}
    return {"id": identity, **NAMES.get(identity, {}), "launch": {"command": SIMULATOR, "args": flags}}


def _real(identity: str, architecture: Architecture, scratch: str, flags: dict[str, Flag] | None = None) -> Json:
    settings = launch(architecture, flags)
    settings["env"]["TMPDIR"] = scratch  # vLLM's processes leave sockets there when they are killed
    settings["env"]["TORCH_COMPILE_DISABLE"] = "1"  # the first request for logprobs would wait for a compiler
    return {"id": identity, **NAMES.get(identity, {}), "launch": settings}


_MODELS: dict[str, Callable[[str], list[Json]]] = {
    "simulator": lambda _: [simulated(LLAMA, "llama"), simulated(QWEN, "qwen3")],
    "qwen": lambda scratch: [_real(QWEN, "qwen3", scratch)],
    "llama": lambda scratch: [_real(LLAMA, "llama", scratch)],
    "pooling": lambda scratch: [_real(QWEN, "qwen3", scratch, dict(POOLING))],
}

_INSIDE = re.compile(
    r"(?<![\w.<])/(?:[\w.@+-]+/)+|\d+\.\d+\.\d+\.\d+|\.sock|Traceback|[Vv]alid aliases|api_server|EngineCore|" + re.escape(sys.prefix)
)


def shows_internals(text: str) -> bool:
    """Whether a text has a path, an address, a list of names or other things that are the operator's."""
    return _INSIDE.search(text) is not None
