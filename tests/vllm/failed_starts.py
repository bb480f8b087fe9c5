"""Starts of a real vLLM that fail, each with the cause that the gateway must report, and the recorder of their logs.

    .venv/bin/python -m tests.vllm.failed_starts [NAME …]

runs each start and writes its log, shortened, to tests/upstream/vllm/failed_starts, where tests/upstream/vllm/test_failures.py reads it
without vLLM. The rule: a log is only recorded, never written by hand. Run it again for a new version of vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.certificates import certificate
from tests.vllm.server import COMMAND, ENVIRONMENT, START_WITHIN, model_path
from upstream.vllm.failures import ProcessExit, find_cause

RECORDS = Path(__file__).resolve().parents[1] / "upstream" / "vllm" / "failed_starts"
WIDTH = 400  # characters of a recorded line
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 1906656\n"


@dataclass(frozen=True, slots=True)
class Start:
    """A start that fails. ``change`` edits a copy of a tiny model; ``args`` and ``env`` are added to a start that would succeed.

    ``hub``: the status, error code and error message with which a stand-in for the Hugging Face hub responds. ``model`` replaces the copy.
    ``{model}``, ``{port}`` and ``{address}`` in texts are the model's folder, a port in use and its address.
    """

    name: str
    cause: str
    args: tuple[str, ...] = ()
    change: Callable[[Path], object] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    model: str = "{model}"
    hub: tuple[int, str, str] | None = None
    tls: bool = False


def _without(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


def _truncated(name: str, share: float = 0.5) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / name
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])

    return change


def _with_config(**settings: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def _pointer(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(POINTER)


def _adapter(model: Path) -> None:
    """Write an adapter of a higher rank than vLLM accepts by default."""
    (model / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 256, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
    (model / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    shutil.copy(model / "model.safetensors", model / "adapter" / "adapter_model.safetensors")


HUB = "an-org/a-model"
LORA = ("--enable-lora", "--lora-modules")

STARTS = (
    Start("git-lfs-weights", "model_files_damaged", change=_pointer("model.safetensors")),
    Start("git-lfs-tokenizer", "model_files_damaged", change=_pointer("tokenizer.json")),
    Start("truncated-weights", "model_files_damaged", change=_truncated("model.safetensors")),
    Start("empty-weights", "model_files_damaged", change=_truncated("model.safetensors", 0)),
    Start("truncated-config", "model_files_damaged", change=_truncated("config.json")),
    Start("truncated-tokenizer", "model_files_damaged", change=_truncated("tokenizer.json")),
    Start("without-tokenizer", "tokenizer_not_found", change=_without("tokenizer.json", "tokenizer_config.json")),
    Start("without-config", "weights_not_found", change=_without("config.json")),
    Start("without-weights", "weights_not_found", change=_without("model.safetensors")),
    Start("no-such-folder", "weights_not_found", model="/models/no-such-model"),
    Start("other-layers", "weights_mismatch", change=_with_config(num_hidden_layers=9, layer_types=None, max_window_layers=9)),
    Start("other-architecture", "unsupported_architecture", change=_with_config(architectures=["NewForCausalLM"])),
    Start("other-model-type", "unsupported_architecture", change=_with_config(model_type="brand-new", architectures=["NewForCausalLM"])),
    Start("remote-code", "remote_code_required",
          change=_with_config(model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})),
    Start("hub-unauthorized", "model_access_denied", model=HUB, hub=(401, "", "Invalid credentials in Authorization header"),
          env={"HF_TOKEN": "hf_wrong"}),
    Start("hub-expired-token", "model_access_denied", model=HUB, hub=(401, "", 'User Access Token "ci" is expired'),
          env={"HF_TOKEN": "hf_old"}),
    Start("hub-gated", "model_access_denied", model=HUB, hub=(403, "GatedRepo", "Access to model an-org/a-model is restricted")),
    Start("hub-forbidden", "model_access_denied", model=HUB,
          hub=(403, "", "Your token does not have the permission to read this repository")),
    Start("hub-not-found", "weights_not_found", model=HUB, hub=(404, "RepoNotFound", "Repository not found")),
    Start("hub-no-revision", "weights_not_found", ("--revision", "v9"), model=HUB, hub=(404, "RevisionNotFound", "Invalid rev id: v9")),
    Start("hub-rate-limit", "hub_rate_limited", model=HUB, hub=(429, "", "We had to rate limit your IP")),
    Start("hub-unavailable", "hub_unreachable", model=HUB, hub=(503, "", "Service unavailable")),
    Start("hub-refuses-connections", "hub_unreachable", model=HUB, env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}),
    Start("hub-proxy", "hub_unreachable", model=HUB,
          env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": "http://127.0.0.1:9"}),
    Start("hub-certificate", "hub_certificate", model=HUB, hub=(404, "RepoNotFound", ""), tls=True),
    Start("hub-offline", "weights_not_found", model=HUB),
    Start("lora-missing", "lora_not_loaded", (*LORA, "a={model}/no-such-adapter")),
    Start("lora-rank", "lora_not_loaded", (*LORA, "a={model}/adapter"), _adapter),
    Start("tls-file-missing", "file_not_found", ("--ssl-certfile", "/tls/no.pem", "--ssl-keyfile", "/tls/no.key")),
    Start("config-file-missing", "file_not_found", ("--config", "/no/such/config.yaml")),
    Start("chat-template-missing", "chat_template_not_found", ("--chat-template", "no/template.jinja")),
    Start("speculative-model-missing", "weights_not_found",
          ("--speculative-config", '{"model": "/models/no-draft", "num_speculative_tokens": 2}')),
    Start("unknown-flag", "unknown_flag", ("--no-such-flag", "1")),
    Start("flag-value", "invalid_flag_value", ("--dtype", "float99")),
    Start("flag-json", "invalid_flag_value", ("--hf-overrides", "{bad")),
    Start("flag-number", "invalid_flag_value", ("--max-num-seqs", "many")),
    Start("flag-range", "invalid_flag_value", ("--gpu-memory-utilization", "7")),
    Start("tool-parser", "unknown_parser", ("--enable-auto-tool-choice", "--tool-call-parser", "nonsense")),
    Start("reasoning-parser", "unknown_parser", ("--reasoning-parser", "nonsense")),
    Start("tools-without-parser", "tools_without_parser", ("--enable-auto-tool-choice",)),
    Start("context-too-long", "context_exceeds_model", ("--max-model-len", "9999999")),
    Start("tensor-parallel", "tensor_parallel_size", ("--tensor-parallel-size", "3")),
    Start("quantization", "unsupported_quantization", ("--quantization", "awq")),
    Start("port", "port_in_use", ("--host", "127.0.0.1", "--port", "{port}")),
    Start("address", "address_not_available", ("--host", "203.0.113.9", "--port", "8123")),
)  # fmt: skip


def record(start: Start) -> None:
    """Run a start until vLLM exits, and write its log. Raises RuntimeError for a start that succeeds."""
    with tempfile.TemporaryDirectory(prefix="start-") as folder, _held_port() as port, _hub(start, Path(folder)) as more:
        root = Path(folder)
        shutil.copytree(model_path("qwen3"), root / "model")
        if start.change is not None:
            start.change(root / "model")

        def text(value: str) -> str:
            return value.replace("{model}", str(root / "model")).replace("{port}", str(port))

        fixed = "--port" in start.args
        options = [*("--enforce-eager", "--dtype", "float32"), *(() if fixed else ("--uds", str(root / "0.sock")))]
        if "--max-model-len" not in start.args:
            options += ["--max-model-len", "2048"]
        command = [str(COMMAND), "serve", text(start.model), *options, *map(text, start.args)]
        environment = {**os.environ, **ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1", "HF_HOME": str(root / "hf"), **more, **start.env}
        with (root / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                status = process.wait(START_WITHIN / 2)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{start.name}: it does not fail") from None
            finally:
                _end_group(process)
        written = (
            (root / "log")
            .read_text(errors="replace")
            .replace(folder, "/models")
            .replace(str(COMMAND.resolve().parents[1]), "/opt/vllm")
            .replace(sys.base_prefix, "/usr/local")
        )
    (RECORDS / f"{start.name}.log").write_text(f"{_shortened(written)}exit code {status}\n")


def recorded(start: Start) -> tuple[str, ProcessExit]:
    """Return the recorded log of a start, and how its process ended."""
    *log, end = (RECORDS / f"{start.name}.log").read_text().splitlines()
    return "\n".join(log), ProcessExit(end, int(end.removeprefix("exit code ")))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # every process of the group has ended
    process.wait()


@contextmanager
def _held_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def _hub(start: Start, folder: Path) -> Iterator[dict[str, str]]:
    """Run the stand-in for the hub that the start needs, and yield the environment that leads to it."""
    if start.hub is None:
        yield {}
        return
    status, code, message = start.hub

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (("X-Error-Code", code), ("X-Error-Message", message), ("Content-Length", "0")):
                if value:
                    self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_arguments: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if start.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate(folder))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            scheme = "https" if start.tls else "http"
            yield {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"{scheme}://localhost:{server.server_port}"}
        finally:
            server.shutdown()
            thread.join()


_FRAME = re.compile(r"(?P<prefix>(?:\([^)]*\) )*(?:ERROR [^\]]*\] )?)(?:  File |    |  \w+Error)")
_INFO = re.compile(r"(?:\([^)]*\) )*(?:INFO|DEBUG) ")


def _shortened(log: str) -> str:
    """Return a log without its INFO lines and without all frames of a traceback but the last, in lines of a bounded width."""
    lines = [line for line in log.splitlines() if not _INFO.match(line)]
    shown, frames = list[str](), list[str]()
    for line in lines:
        if _FRAME.match(line):
            frames.append(line)
            continue
        shown += frames[-2:]
        frames.clear()
        shown.append(line)
    return "".join(f"{line[:WIDTH]}\n" for line in [*shown, *frames[-2:]])


def main(names: list[str]) -> int:
    """Record the named starts, or all. Return the number of starts whose cause is not the expected one."""
    wrong = 0
    for start in STARTS:
        if names and start.name not in names:
            continue
        try:
            record(start)
        except RuntimeError as error:
            print(error, flush=True)
            wrong += 1
            continue
        cause = find_cause(*recorded(start))
        wrong += cause.code != start.cause
        print(
            f"{'ok   ' if cause.code == start.cause else 'WRONG'} {start.name}: {cause.code} ({start.cause}): {cause.line[:150]}",
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
