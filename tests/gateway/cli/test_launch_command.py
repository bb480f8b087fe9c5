"""``vllm-gateway command`` prints the command of a launch; the tests run the printed command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.gateway.config.test_models import HASH

PROGRAM = Path(sys.executable).with_name("vllm-gateway")
SECRET = "canary-9f2c41"


def written(folder: Path) -> None:
    report = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    launch = {
        "command": [sys.executable, "-c", report],
        "replicas": 2,
        "gpus": [[0, 1], [2, 3]],
        "args": {"chat-template": "it's a $HOME template", "hf_token": SECRET, "enforce-eager": True},
        "env": {"NOTE": "two words", "HF_TOKEN": {"env": "TOKEN"}, "MY_PASSWORD": SECRET},
    }
    loras = [{"id": "sql", "path": "./sql"}]
    models = [{"id": "org/m", "launch": launch, "loras": loras}, {"id": "far", "servers": [{"url": "http://h:1"}]}]
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"models": models, "keys": [{"id": "a", "hash": HASH}]}))


def command(folder: Path, model: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TOKEN": SECRET}
    return subprocess.run([PROGRAM, "command", model], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)


def test_the_printed_command_is_the_launched_command_without_secrets(tmp_path: Path) -> None:
    written(tmp_path)
    done = command(tmp_path, "org/m")
    assert (done.returncode, done.stderr) == (0, "")
    assert SECRET not in done.stdout
    blocks = done.stdout.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["# org/m#0", "# org/m#1"]
    for number, block in enumerate(blocks):
        ran = subprocess.run(["sh", "-c", block], capture_output=True, text=True, check=True, timeout=60)
        arguments, environ = json.loads(ran.stdout)
        assert arguments[:5] == ["org/m", "--served-model-name", "org/m", "--uds", f"/tmp/vllm-gateway-XXXXXXXX/{number}.sock"]
        assert arguments[-5:] == ["--chat-template", "it's a $HOME template", "--enforce-eager", "--hf-token", "***"]
        assert json.loads(arguments[arguments.index("--lora-modules") + 1])["path"] == str(tmp_path / "sql")
        shown = {name: environ[name] for name in ("CUDA_VISIBLE_DEVICES", "NOTE", "HF_TOKEN", "MY_PASSWORD", "VLLM_API_KEY")}
        assert list(shown.values()) == ["0,1" if number == 0 else "2,3", "two words", "***", "***", "***"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/n", "there is no model org/n in gateway.yaml; did you mean `org/m`?"),
        ("far", "far is not launched: its servers run elsewhere"),
    ],
)
def test_a_model_that_has_no_command(tmp_path: Path, model: str, expected: str) -> None:
    written(tmp_path)
    done = command(tmp_path, model)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"vllm-gateway: {expected}\n")
