"""The chart's containers as processes of this machine: simulators with the engines' arguments, and the gateway's mounted files.

The rule: what runs is what was rendered, with the paths, addresses and ports that it has here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import yaml

from gateway.auth.keys import hash_of
from tests.deploy.chart import Manifest, Rendered
from tests.support.process import wait_for, write
from tests.support.running import KEY

_LISTENS = re.compile(r"Starting vLLM server on http://127\.0\.0\.1:(\d+)")


@contextmanager
def engine(rendered: Rendered, component: str, root: Path) -> Iterator[int]:
    """The simulator with the arguments and variables of an engine's container, on a free port of this machine."""
    container = rendered.container(component)
    ((path, port),) = {(probe["httpGet"]["path"], probe["httpGet"]["port"]) for name, probe in container.items() if name.endswith("Probe")}
    assert [each["name"] for each in container["ports"]] == [port]
    rendered.mount(root / component, component=component)
    local = {"0.0.0.0": "127.0.0.1", "8000": "0"}
    arguments = [
        local.get(argument, argument).replace("/etc/vllm-gateway/", f"{root}/{component}/etc/vllm-gateway/")
        for argument in container["args"]
    ]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    command = [sys.executable, "-P", "-m", "upstream.simulator", *arguments]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next((match[1] for line in process.stderr if (match := _LISTENS.search(line))), None)
        assert found, "the simulator has ended"
        url = f"http://127.0.0.1:{found}"
        wait_for(lambda: httpx2.get(url + path, timeout=60).status_code == 200)
        yield int(found)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def here(root: Path, ports: dict[str, int]) -> Path:
    """The folder of the gateway's configuration, on free ports, with this machine's address for the name of a Service."""
    file = root / "etc/vllm-gateway/config/gateway.yaml"
    config = yaml.safe_load(file.read_text())
    admin = config["server"]["admin"] | {"host": "127.0.0.1", "port": 0}
    config["server"] |= {"host": "127.0.0.1", "port": 0, "admin": admin, "linger": "0s"}
    for model in config["models"]:
        model["discover"]["dns"] |= {"name": "127.0.0.1", "port": ports[model["id"]]}
    write(file, config)
    return file.parent


def mounted(rendered: Rendered, root: Path) -> None:
    """The files of the gateway's container below ``root``, with the paths in them."""
    names = ("gateway-keys", "engine-key", "gateway-admin", "admin", "admin-token")
    made = {each["metadata"]["name"] for each in rendered.all("Secret")}
    keys = yaml.safe_dump({"keys": [{"id": "team", "hash": hash_of(KEY)}]})
    rendered.mount(
        root, [foreign(name, {"keys.yaml": keys, "key": "engine", "token": "t", "bearer": "t"}) for name in names if name not in made]
    )
    file = root / "etc/vllm-gateway/config/gateway.yaml"
    file.write_text(file.read_text().replace("/etc/vllm-gateway", str(root / "etc/vllm-gateway")))


def foreign(name: str, texts: dict[str, str]) -> Manifest:
    """A Secret that exists already."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": texts}
