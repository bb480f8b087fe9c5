"""The files that the documents show are fine by what reads them: the gateway, Helm's tests, Kubernetes' schemas, Prometheus."""

from __future__ import annotations

import base64
import configparser
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.models import Admin
from gateway.snapshot.key_properties import PROPERTIES
from tests.deploy.chart import Rendered, judged
from tests.documents.blocks import DOCS, README, Block, blocks, identity
from tests.support.certificates import certificate
from upstream.balancing.policies import POLICIES

BIN = Path(sys.executable).parent
REFERENCE = runpy.run_path(str(DOCS / "reference.py"))
_SECRET_TEXT = base64.b64encode(b"a-secret-that-fits-all-settings!").decode()
"""Long enough for each setting, and an encryption key."""
CLIENTS = {".aider.conf.yml": {"model", "openai-api-base", "show-model-warnings"}, "config.yaml": {"name", "version", "schema", "models"}}
"""Settings of clients: the files' names, and their sections."""
READERS = ("gateway.yaml", "keys.yaml", "prometheus.yml", "values*.yaml", "rbac.yaml", *CLIENTS)
"""The files' names; tests/deploy/test_chart.py renders the values."""

YAML = blocks("yaml")
CONFIGURATIONS = [block for block in YAML if block.file == "gateway.yaml"]
KEYS = [block.text for block in YAML if block.file == "keys.yaml"][-1]
WHOLE = next(block for block in CONFIGURATIONS if block.page.name == "configuration.md")
ALTERNATIVES = re.findall(r"`(command: \[.*?\]|servers: \[.*?\])`", README.read_text())
BASE: dict[str, Any] = {
    "models": [{"id": "Qwen/Qwen3-8B", "servers": [{"url": "http://10.0.0.5:8000"}]}],
    "keys": [{"id": "team-a", "hash": "sha256:" + "0" * 64}],
}
"""The configuration around a fragment."""


def whole(text: str) -> str:
    """A configuration as it is; a fragment with what it lacks."""
    shown = yaml.safe_load(text)
    return text if shown.keys() >= BASE.keys() else yaml.safe_dump(BASE | shown)


def references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the references to secrets, ``{env: NAME}`` and ``{file: PATH}``, as pairs."""
    if isinstance(value, dict):
        if value.keys() in ({"env"}, {"file"}):
            yield from value.items()
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def checked(folder: Path, text: str, keys: str = KEYS) -> str:
    """Return the output of ``check`` for a file, with the files beside it and the secrets that it refers to. ``keys`` is in keys.yaml."""
    (folder / "keys.yaml").write_text(keys)
    secrets = [*references(yaml.safe_load(text))]
    for kind, name in secrets:
        if kind == "file":
            (folder / name).write_text(_SECRET_TEXT + "\n")
    programs = gpus_and_vllm(folder)
    (folder / "gateway.yaml").write_text(re.sub(r"/opt/[\w./-]+/vllm\b", str(programs / "vllm"), text))
    if "tls:" in text:
        for file, name in zip(certificate(folder), ("tls.crt", "tls.key"), strict=True):
            file.rename(folder / name)
    for path in re.findall(r" (\./[\w./-]+)", text):
        (folder / path).mkdir(parents=True)
    environ = os.environ | {name: _SECRET_TEXT for kind, name in secrets if kind == "env"}
    environ["PATH"] = f"{programs}{os.pathsep}{environ['PATH']}"
    command = [str(BIN / "vllm-gateway"), "check", "gateway.yaml"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def gpus_and_vllm(folder: Path) -> Path:
    """Make a folder with a program that lists more GPUs than the pages mention, and a stand-in for vLLM. Return the folder."""
    listed = "".join(f"GPU {number}: one (UUID: GPU-{number})\n" for number in range(8))
    (folder / "bin").mkdir()
    for name, line in (("nvidia-smi", f"cat <<'END'\n{listed}END"), ("vllm", "exit 1")):
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    return folder / "bin"


@pytest.mark.parametrize("block", YAML, ids=identity)
def test_a_shown_file_has_a_reader(block: Block) -> None:
    assert any(Path(block.file).match(name) for name in READERS), f"nothing reads a {block.file}"


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=identity)
def test_a_shown_configuration_is_fine_and_does_all_it_says(tmp_path: Path, block: Block) -> None:
    output = checked(tmp_path, whole(block.text))
    assert output.startswith("gateway.yaml is valid: ") and output.endswith(", 0 notes\n")


@pytest.mark.parametrize("block", [block for block in YAML if block.file == "keys.yaml"], ids=identity)
def test_shown_keys_are_fine(tmp_path: Path, block: Block) -> None:
    (tmp_path / "keys.yaml").write_text(block.text)
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump({"models": BASE["models"], "keys_file": "keys.yaml"}))
    command = [str(BIN / "vllm-gateway"), "check", "gateway.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"gateway.yaml is valid: 1 model, {len(yaml.safe_load(block.text)['keys'])} key, 0 notes\n", done


def test_both_other_ways_to_servers_are_shown() -> None:
    assert [written.partition(":")[0] for written in ALTERNATIVES] == ["servers", "command"]


@pytest.mark.parametrize("written", ALTERNATIVES)
def test_the_other_ways_to_servers_are_fine_too(tmp_path: Path, written: str) -> None:
    text = next(block.text for block in CONFIGURATIONS if block.page == README)
    launch = re.search(r"    launch:.*\n(?:      .*\n)+", text)
    assert launch is not None
    below_launch = written.startswith("command:")
    changed = text.replace(launch[0], f"{launch[0]}      {written}\n" if below_launch else f"    {written}\n")
    assert checked(tmp_path, whole(changed)).startswith("gateway.yaml is valid: ")


def test_the_whole_file_shows_every_setting() -> None:
    """Properties of keys and settings of policies may be missing, so that each is declared in one file. The reference lists them."""
    shown = set(paths(yaml.safe_load(WHOLE.text), ""))
    optional = re.compile(rf"keys\[\]\.({'|'.join(PROPERTIES)})|models\[\]\.({'|'.join(POLICIES)})_policy(\..*)?")
    known = {setting.path for group in REFERENCE["groups"]() for setting in group.settings}
    assert {path for path in known - shown if not optional.fullmatch(path)} == set()


def paths(value: object, path: str) -> Iterator[str]:
    """The path of everything in a document, as the reference writes them."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield (here := f"{path}.{name}".removeprefix("."))
            yield from paths(below, here)
    elif isinstance(value, list):
        for below in value:
            yield from paths(below, path + "[]")


@pytest.mark.parametrize("page", REFERENCE["PAGES"], ids=identity)
def test_what_is_made_from_the_code_is_current(page: Path) -> None:
    assert page.read_text() == REFERENCE["renewed"](page), "run .venv/bin/python docs/reference.py"


@pytest.mark.parametrize("block", [block for block in YAML if block.file == "rbac.yaml"], ids=identity)
def test_kubernetes_objects_are_fine_by_its_schemas(block: Block) -> None:
    manifests = tuple(yaml.safe_load_all(block.text))
    assert len(manifests) > 1
    assert judged({"shown": Rendered(manifests)}) == {"shown": []}


def test_the_scraped_port_is_the_default_one() -> None:
    (prometheus,) = (yaml.safe_load(block.text) for block in YAML if block.file == "prometheus.yml")
    admin = Admin()
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": [f"{admin.host}:{admin.port}"]}]


def promtool(what: str, file: Path) -> None:
    """Have Prometheus' own tool check a file. Skips the test where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([program, "check", what, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", [block for block in YAML if block.file == "prometheus.yml"], ids=identity)
def test_prometheus_takes_its_configuration(tmp_path: Path, block: Block) -> None:
    (tmp_path / block.file).write_text(block.text)
    promtool("config", tmp_path / block.file)


@pytest.mark.parametrize("block", blocks("promql"), ids=identity)
def test_a_query_is_one(tmp_path: Path, block: Block) -> None:
    rule = {"record": "shown", "expr": block.text}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": [rule]}]}))
    promtool("rules", tmp_path / "rules.yaml")


def test_nginx_takes_its_configuration(tmp_path: Path) -> None:
    for block in blocks("nginx"):
        program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            pytest.skip("nginx is not installed (Debian: nginx)")
        file = tmp_path / "nginx.conf"
        file.write_text(f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{block.text}}}\n")
        done = subprocess.run([program, "-t", "-c", str(file)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{block}: {done.stderr}"


def test_units_of_systemd_have_sections_and_settings() -> None:
    for block in blocks("ini"):
        parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
        parser.read_string(block.text)
        assert parser.sections(), block


@pytest.mark.parametrize("block", [block for block in YAML if block.file in CLIENTS], ids=identity)
def test_clients_settings_have_their_sections(block: Block) -> None:
    assert set(yaml.safe_load(block.text)) == CLIENTS[block.file]


@pytest.mark.parametrize("block", blocks("toml"), ids=identity)
def test_toml_is_toml(block: Block) -> None:
    tomllib.loads(block.text)


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.reason is not None], ids=identity)
def test_python_that_is_not_run_is_well_formed(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [block for block in blocks("js") if block.reason is not None], ids=identity)
def test_javascript_that_is_not_run_is_well_formed(tmp_path: Path, block: Block) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (Debian: nodejs)")
    (tmp_path / "shown.mjs").write_text(block.text)
    done = subprocess.run([node, "--check", tmp_path / "shown.mjs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("json"), ids=identity)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)
