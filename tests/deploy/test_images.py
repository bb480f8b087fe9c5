"""The images: built as `make image` and `make image-vllm` build them, and run with a read-only root by a user without rights."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from gateway.auth import keys
from tests.deploy.chart import CHART, program
from tests.deploy.containers import Container, Network, Settings, container, network
from tests.deploy.images import FILES, Image, image
from tests.deploy.install import ROOT, tool
from tests.support.process import wait_for
from tests.support.running import KEY
from tests.test_lock import entries

FOLDER = ROOT / "deploy" / "docker"
HOME = "/var/lib/vllm-gateway"
MODEL = "sim/one"
OWN = ("opt/vllm-gateway", "usr/local/bin/vllm-gateway", HOME[1:], "etc/vllm-gateway")
"""Where an image has what its base has not."""


@pytest.fixture(params=FILES)
def built(request: pytest.FixtureRequest) -> Image:
    return image(request.param)


@pytest.fixture
def net() -> Iterator[Network]:
    with network() as found:
        yield found


def settings(of: Image, folder: Path, config: dict[str, Any]) -> Settings:
    """The image as it is, with a configuration in the place where it looks for one."""
    target = folder / "config"
    target.mkdir()
    (target / "gateway.yaml").write_text(yaml.safe_dump(config))
    command = [*of.config["Entrypoint"], *of.config["Cmd"]]
    mounts = {"/etc/vllm-gateway/config": target}
    return Settings(command, of.config["User"], of.environment, of.config["WorkingDir"], mounts, ("/tmp", HOME))


def configured(model: dict[str, Any]) -> dict[str, Any]:
    return {"server": {"host": "0.0.0.0", "drain": "5s"}, "models": [model], "keys": [{"id": "team-a", "hash": keys.hash_of(KEY)}]}


def status_of(net: Network, token: str = KEY) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    return net.request("http://127.0.0.1:8000/v1/chat/completions", body, authorization=f"Bearer {token}")[0]


def healthy(running: Container, of: Image) -> bool:
    kind, *arguments = of.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    return running.run(*arguments).returncode == 0


def test_the_gateway_serves_from_a_read_only_root_and_stops_in_order(net: Network, tmp_path: Path) -> None:
    of = image("image")
    stand_in = ["simulate", MODEL, "--port", "8001"]
    config = configured({"id": MODEL, "servers": [{"url": "http://127.0.0.1:8001"}]})
    given = settings(of, tmp_path, config)
    simulator = Settings([*of.config["Entrypoint"], *stand_in], given.user, given.environment, given.folder)
    with container(of, net, given, tmp_path / "gateway") as gateway:
        wait_for(lambda: net.request("http://127.0.0.1:9090/livez")[0] == 200, 60, why=lambda: gateway.output)
        wait_for(lambda: healthy(gateway, of), 60, why=lambda: gateway.output)  # a server that is down does not affect service
        with container(of, net, simulator, tmp_path / "simulator") as server:
            wait_for(lambda: status_of(net) == 200, 60, why=lambda: gateway.output + server.output)
        wait_for(lambda: not psutil.pid_exists(server.pid))
        assert status_of(net, "sk-another") == 401
        status = gateway.run("vllm-gateway", "status", "--config", "/etc/vllm-gateway/config/gateway.yaml")
        assert MODEL in status.stdout, status
        assert gateway.run("touch", "/opt/vllm-gateway/a").returncode != 0
        assert gateway.run("grep", "-cE", "^Cap(Prm|Eff|Bnd):\\s0{16}$", "/proc/1/status").stdout == "3\n"
        assert gateway.stop() == 0, gateway.output


def test_the_gateway_beside_vllm_launches_it(net: Network, tmp_path: Path) -> None:
    of = image("image-vllm")
    with container(of, net, settings(of, tmp_path, configured({"id": MODEL, "launch": {}})), tmp_path / "gateway") as gateway:
        assert not healthy(gateway, of)
        wait_for(lambda: status_of(net) == 200, 120, why=lambda: gateway.output)
        wait_for(lambda: healthy(gateway, of), 60, why=lambda: gateway.output)
        log = gateway.run("sh", "-c", f"cat {HOME}/.local/state/vllm-gateway/logs/*").stdout
        found = next(json.loads(line) for line in log.splitlines() if line.startswith('{"'))
        assert gateway.stop() == 0, gateway.output
    assert found["prefix"] == "/usr" and found["python3"] == "/usr/bin/python3", "vLLM's interpreter is its own"
    assert not found["gateway"] and not [path for path in found["path"] if "vllm-gateway" in path], "and so are its packages"
    assert not {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"} & set(found["environment"])


def test_nothing_of_the_base_is_changed(built: Image) -> None:
    base = tool("base")
    assert base is not None
    changed = []
    with tarfile.open(base) as archive:
        for entry in archive:
            file = built.root / entry.name
            if entry.isfile() and not entry.name.startswith(("./etc/", "./dev/", "./var/log/", "./var/lib/systemd/")):
                found = file.lstat() if file.exists() else None
                if found is None or (found.st_size, int(found.st_mtime)) != (entry.size, int(entry.mtime)):
                    changed.append(entry.name)
    assert not changed


def test_what_is_in_it_is_the_gateways_environment_and_no_tool_to_build_one(built: Image) -> None:
    packages = {path.name for path in built.root.glob("opt/vllm-gateway/lib/python*/site-packages/*")}
    assert {"gateway", "upstream", "uvicorn", "opentelemetry", "jwt"} <= packages
    assert not {"pip", "setuptools", "hatchling", "pytest", "mypy", "tests"} & packages
    assert not [name for name in ("gcc", "cc", "make", "ld", "c++") if os.path.lexists(built.root / "usr/bin" / name)]
    assert not (built.root / "build").exists() and not (built.root / "src").exists() and not (built.root / "wheels").exists()


def test_its_user_owns_a_home_and_nothing_else(built: Image) -> None:
    user, group = map(int, built.config["User"].split(":"))
    assert f":x:{user}:{group}:" in (built.root / "etc/passwd").read_text(), "libraries ask for the user's name"
    owned = {path for path in built.root.rglob("*") if path.lstat().st_uid == user and not path.is_relative_to(built.root / HOME[1:])}
    assert not owned and (built.root / HOME[1:]).stat().st_uid == user
    open_to_all = [
        path for target in OWN for path in (built.root / target).rglob("*") if not path.is_symlink() and path.stat().st_mode & stat.S_IWOTH
    ]
    assert not open_to_all


def test_its_labels_say_what_it_is(built: Image) -> None:
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in built.config["Labels"].items()}
    assert labels["version"] == "tested" and labels["base.name"] == "localhost/base" and labels["licenses"] == "Apache-2.0"
    assert labels["title"].startswith("vllm-gateway") and labels["description"] and "revision" in labels


def test_the_chart_runs_it_as_the_user_that_it_has(built: Image) -> None:
    context = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    assert built.config["User"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert (built.root / "etc/vllm-gateway/config").is_dir() and (built.root / "etc/vllm-gateway/keys").is_dir()


DIGEST = "sha256:" + "0123456789abcdef" * 4
PINNED = {"BASE": f"registry.example.com/python:3.13@{DIGEST}", "VLLM_BASE": f"registry.example.com/vllm@{DIGEST}"}


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make with a builder that prints how it was called."""
    named = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(
        ["make", "--silent", *arguments, "BUILD=echo built", *named], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_an_image_is_built_on_the_named_base() -> None:
    plain, beside = (make(goal, **PINNED).stdout for goal in FILES)
    assert f"--build-arg BASE={PINNED['BASE']} " in plain and f"--build-arg BASE={PINNED['VLLM_BASE']} " in beside
    assert "BASE=" not in make(*FILES).stdout, "the default is the Dockerfile's"


def test_a_release_is_built_on_bases_that_are_named_by_digest() -> None:
    done = make("release-images", **PINNED)
    assert done.returncode == 0 and done.stdout.count("built ") == 2 and all(base in done.stdout for base in PINNED.values()), done.stderr
    for name, base in PINNED.items():
        for other in ("", base.partition("@")[0], base[:-1], f"{base}0", base.replace("a", "g")):
            refused = make("release-images", **PINNED | {name: other})
            assert refused.returncode != 0 and "built" not in refused.stdout, other
            assert f"{name} names no image by digest" in refused.stderr


@pytest.mark.parametrize("name", FILES.values())
def test_hadolint_finds_nothing(name: str) -> None:
    linter = Path(program("images")).with_name("hadolint")
    done = subprocess.run([linter, "--no-color", FOLDER / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_both_files_build_the_environment_alike() -> None:
    plain, beside = ((FOLDER / name).read_text().partition("\nFROM ${BASE}\n")[0].partition("\nFROM ")[2] for name in FILES.values())
    assert plain == beside and plain


def test_the_images_lock_has_all_that_the_gateway_needs() -> None:
    locked = {_normalized(name) for name, _ in entries(FOLDER / "runtime.lock")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["otel"], *extras["jwt"], *extras["oidc"], *extras["kv-events"]]
    wanted += [*extras["record"], *extras["record-s3"]]
    assert {_normalized(re.split(r"[\[<>=;~! ]", line)[0]) for line in wanted} <= locked


def _normalized(name: str) -> str:
    """A package's name in the one form that all spellings share (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
