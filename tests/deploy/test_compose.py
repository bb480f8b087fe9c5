"""The compose file: what it says is so, and its gateway serves with its own settings, secrets and neighbors."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from tests.deploy.chart import program
from tests.deploy.containers import Container, Network, Settings, container, network
from tests.deploy.images import Image, image
from tests.deploy.install import ROOT
from tests.support import postgres
from tests.support.process import wait_for

FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
HOSTS = ("engine", "redis", "postgres")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder as in a clone, with its secrets created; the first key is in the file ``key``."""
    folder = tmp_path / "deploy" / "compose"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("secrets"))
    for name in ("alertmanager", "prometheus", "grafana"):
        shutil.copytree(FOLDER.parent / name, tmp_path / "deploy" / name)
    output = secrets(folder)
    (folder / "key").write_text(re.findall(r"sk-\S+", output)[0])
    return folder


def secrets(folder: Path) -> str:
    return subprocess.run([folder / "secrets.sh"], check=True, capture_output=True, text=True).stdout


def plain(text: str) -> str:
    """Expand ``${NAME:-default}`` and ``$$`` as compose does."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


# The file


def test_it_is_what_composes_schema_allows() -> None:
    checker = Path(program("images")).with_name("check-jsonschema")
    arguments = [str(checker), "--builtin-schema", "vendor.compose-spec", str(FOLDER / "compose.yaml")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_whatever_it_mounts_is_there(project: Path) -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (project / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], (name, volume)
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
    assert all((project / secret["file"]).is_file() for secret in COMPOSE["secrets"].values())


def test_every_image_has_a_version_and_every_service_a_check() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":v?\d", plain(service["image"])), name
        assert "test" in service["healthcheck"] or name == "gateway", "the gateway's image has its own"
        assert service["restart"] == "unless-stopped"
    assert plain(SERVICES["gateway"]["image"]) == f"vllm-gateway:{__version__}"


def test_only_the_data_port_is_open_to_others() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == ["8000:8000"]


def test_a_stop_has_the_time_that_requests_have() -> None:
    drain = yaml.safe_load((FOLDER / "config" / "gateway.yaml").read_text())["server"]["drain"]
    assert int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > int(drain.removesuffix("s"))


def test_prometheus_reads_what_it_reads_elsewhere_under_the_services_names() -> None:
    elsewhere = (FOLDER.parent / "prometheus" / "prometheus.yaml").read_text()
    expected = elsewhere.replace("127.0.0.1:9090", "gateway:9090").replace("127.0.0.1:9093", "alertmanager:9093")
    assert yaml.safe_load((FOLDER / "prometheus.yaml").read_text()) == yaml.safe_load(expected)


def test_grafana_finds_the_dashboards_and_prometheus() -> None:
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasources.yaml").read_text())["datasources"]
    mounted = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in SERVICES["grafana"]["volumes"])
    assert mounted[provider["options"]["path"]] == "../grafana" and list((FOLDER / "../grafana").glob("*.json"))
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"


def test_secrets_are_created_once_and_reused(project: Path) -> None:
    folder = project / "secrets"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert secrets(project) == "" and {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert len({hash(data) for data in before.values()}) == len(before)
    (folder / "engine_key").unlink()
    secrets(project)
    assert (folder / "engine_key").read_bytes() != before[folder / "engine_key"]
    assert folder.stat().st_mode & 0o077 == 0 and all(path.stat().st_mode & 0o444 == 0o444 for path in before)
    assert not [path for path, data in before.items() if (project / "key").read_bytes() in data], "of a key there is its hash alone"
    git = subprocess.run(["git", "check-ignore", "-q", FOLDER / "secrets" / "engine_key"], cwd=ROOT)
    assert git.returncode == 0, "git ignores them"


# The running services


def test_its_gateway_serves_as_it_says(project: Path, tmp_path: Path) -> None:
    if not (postgres.installed() and shutil.which("redis-server")):
        pytest.skip("PostgreSQL or Redis is not installed (Debian: postgresql, redis-server)")
    built, token = image("image"), (project / "key").read_text()
    with open(project / "secrets" / "keys" / "keys.yaml", "a") as file:
        file.write("    limits: {requests_per_minute: 1000}\n")
    serve, simulate = settings(built, project, "gateway"), settings(built, project, "simulator")
    with (
        network() as net,
        redis(net, project),
        database(net, project),
        container(built, net, simulate, tmp_path / "simulator") as engine,
        container(built, net, serve, tmp_path / "gateway") as gateway,
    ):
        wait_for(lambda: chat_status(net, token)[0] == 200, 60, why=lambda: gateway.output + engine.output)
        status, text = chat_status(net, token)
        assert (status, json.loads(text)["model"]) == (200, "Qwen/Qwen3-0.6B")
        assert chat_status(net, "sk-another")[0] == 401
        assert net.request("http://127.0.0.1:8001/v1/models")[0] == 401, "the engine asks for its key"
        assert passed(gateway, built.config["Healthcheck"]["Test"]) and passed(engine, SERVICES["simulator"]["healthcheck"]["test"])
        usage = ["usage", "--config", "/etc/vllm-gateway/config/gateway.yaml", "--format", "json"]
        wait_for(lambda: '"admin"' in gateway.run("vllm-gateway", *usage).stdout, 60, why=lambda: gateway.output)
        assert redis_says(net, project, "DBSIZE") not in ("", "0"), "limits are counted there"
        assert gateway.stop() == 0, gateway.output


def chat_status(net: Network, token: str) -> tuple[int, str]:
    body = {"model": "qwen", "messages": [{"role": "user", "content": "Hello"}]}
    return net.request("http://127.0.0.1:8000/v1/chat/completions", body, authorization=f"Bearer {token}")


def passed(running: Container, check: list[str]) -> bool:
    assert check[0] == "CMD"
    return running.run(*check[1:]).returncode == 0


def settings(built: Image, project: Path, name: str) -> Settings:
    """A service of the project's own image, as in the file. Named volumes are in memory here."""
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    command = [*service.get("entrypoint", built.config["Entrypoint"]), *map(plain, service.get("command", built.config["Cmd"]))]
    mounts = {f"/run/secrets/{secret}": project / COMPOSE["secrets"][secret]["file"] for secret in service["secrets"]}
    memory = list(service["tmpfs"])
    for volume in service.get("volumes", ()):
        source, path, *_ = volume.split(":")
        if source.startswith("."):
            mounts[path] = project / source
        else:
            memory.append(path)
    return Settings(command, built.config["User"], built.environment, built.config["WorkingDir"], mounts, memory, HOSTS)


@contextmanager
def redis(net: Network, project: Path) -> Iterator[None]:
    """Run the server with the command of its service, as an unprivileged user."""
    with tempfile.TemporaryDirectory(prefix="redis-") as name:  # readable by other users
        os.chmod(name, 0o755)
        shutil.copy(project / "secrets" / "redis_conf", name)
        command = [argument.replace("/run/secrets", name) for argument in SERVICES["redis"]["command"]]
        with neighbor(net, "nobody", [*command, "--save", "", "--dir", "/"], Path(name) / "log"):
            wait_for(lambda: redis_says(net, project, "PING") == "PONG", 60, why=lambda: (Path(name) / "log").read_text())
            yield


def redis_says(net: Network, project: Path, command: str) -> str:
    password = (project / "secrets" / "redis_conf").read_text().split()[1]
    arguments = [*net.enter, "redis-cli", command]
    return subprocess.run(
        arguments, env={**os.environ, "REDISCLI_AUTH": password}, capture_output=True, text=True, timeout=30
    ).stdout.strip()


@contextmanager
def database(net: Network, project: Path) -> Iterator[None]:
    """A PostgreSQL as its image makes one of the service's variables."""
    variables = SERVICES["postgres"]["environment"]
    user, password = variables["POSTGRES_USER"], project / "secrets" / Path(variables["POSTGRES_PASSWORD_FILE"]).name
    with tempfile.TemporaryDirectory(prefix="pg-") as name:  # a short path: unix sockets allow 107 bytes
        shutil.chown(name, "postgres", "postgres")
        secret = Path(name) / "password"
        shutil.copy(password, secret)
        secret.chmod(0o644)
        made = [
            f"{name}/data",
            "--username",
            user,
            "--pwfile",
            str(secret),
            "--auth",
            "scram-sha-256",
            "--no-sync",
            "--encoding",
            "UTF8",
            "--locale",
            "C",
        ]
        subprocess.run([*someone("postgres"), postgres.program("initdb"), *made], check=True, capture_output=True, cwd="/")
        arguments = [postgres.program("postgres"), "-D", f"{name}/data", "-k", name, "-c", "fsync=off"]
        with neighbor(net, "postgres", arguments, Path(name) / "log"):
            environ = {**os.environ, "PGPASSWORD": password.read_text()}
            client = [*net.enter, "psql", "-h", "127.0.0.1", "-U", user, "-d", "postgres"]
            create = [*client, "-c", f"CREATE DATABASE {variables['POSTGRES_DB']}"]

            def done() -> bool:
                return subprocess.run(create, env=environ, capture_output=True, timeout=30).returncode == 0

            wait_for(done, 60, why=lambda: (Path(name) / "log").read_text())
            yield


@contextmanager
def neighbor(net: Network, user: str, arguments: list[str], log: Path) -> Iterator[None]:
    """A program of this machine in the network."""
    command = [*net.enter, "setpriv", "--pdeathsig", "KILL", *someone(user)[1:], *arguments]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/")
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)  # to PostgreSQL: at once, but in order
        process.wait(60)


def someone(user: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups", "--"]
