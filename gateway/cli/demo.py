"""The demo: a gateway with a simulated model that it launches, a new key, and a curl command.

Owns a temporary folder with the configuration, which is removed at the end. The gateway itself does not know about the demo.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import yaml

from gateway.auth import keys
from gateway.control.serve import serve
from gateway.control.startup_messages import Announcer
from upstream.launcher.ports import free_port

MODEL = "demo/qwen3"
_PORTS = (8000, 9090)


def run() -> int:
    """Serve the demo until SIGTERM or Ctrl-C, and return the exit code."""
    key = keys.mint("demo")
    with tempfile.TemporaryDirectory(prefix="vllm-gateway-demo-") as folder:
        file = Path(folder) / "gateway.yaml"
        data, admin = map(_free, _PORTS)
        file.write_text(yaml.safe_dump(configuration(key, data, admin), sort_keys=False))
        os.environ["XDG_STATE_HOME"] = folder  # so that the launched server's log is removed with the folder
        return serve(file, _DemoAnnouncer(_HELP.format(port=data, admin=admin, key=key, model=MODEL)))


def configuration(key: str, data: int, admin: int) -> dict[str, object]:
    """Return the configuration of the demo."""
    return {
        "server": {"host": "127.0.0.1", "port": data, "portal": True, "admin": {"port": admin}},
        "models": [
            {
                "id": MODEL,
                "aliases": ["demo"],
                "launch": {
                    "command": [sys.executable, "-P", "-m", "upstream.simulator"],
                    "args": {
                        "reasoning-parser": "qwen3",
                        "enable-auto-tool-choice": True,
                        "tool-call-parser": "qwen3_coder",
                        "max-model-len": 32768,
                    },
                },
            }
        ],
        "keys": [{"id": "demo", "hash": keys.hash_of(key)}],
    }


class _DemoAnnouncer(Announcer):
    """Prints a curl command when the model is up."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def serving(self, up: int, total: int) -> None:
        super().serving(up, total)
        if up:
            print(self._text, flush=True)


_HELP = """
The model is simulated: the text of its responses is made up.
Portal:      http://127.0.0.1:{port}/portal#key={key}
Status page: http://127.0.0.1:{admin}/status

Open the portal in a browser to talk to the model, or try it from another terminal (add "stream": true to see it stream):

curl -sN http://127.0.0.1:{port}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \
-d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

Press Ctrl-C to stop."""


def _free(port: int) -> int:
    """Return a port if it is free, else another free port."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return port
    return free_port()
