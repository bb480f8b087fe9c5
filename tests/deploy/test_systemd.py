"""The unit and what installs it: systemd's own judgment of the one, and the other run into a folder, where the unit's command runs then.

systemd itself does not run here. The test is the service manager: it takes the unit's words and variables and listens to notifications.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx2
import psutil
import pytest

from gateway.config import load
from gateway.config.models import ServerSection
from gateway.fleet.transitions import STOP_GRACE
from tests.deploy import confined
from tests.deploy.chart import program
from tests.deploy.install import ROOT
from tests.deploy.released import build, offline
from tests.support.process import gateway, wait_for
from tests.support.service_manager import service_manager

FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "vllm-gateway.service"
INSTALL = FOLDER / "install.sh"
THRESHOLD = 25  # tenths of systemd's measure of exposure, of which a service with no hardening has 96
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0}


def settings(unit: Path) -> dict[str, list[str]]:
    """Return a unit's settings; a repeated setting has several values."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def seconds(unit: dict[str, list[str]], name: str) -> float:
    match = re.fullmatch(r"(\d+)(s|min|)", unit[name][0])
    assert match, unit[name]
    return int(match[1]) * _UNITS[match[2]]


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    needs_systemd()
    return subprocess.run(["systemd-analyze", "--no-pager", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def needs_systemd() -> None:
    """Skip the test without systemd, and so without libseccomp."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")


def installing(
    *arguments: str | Path, script: Path = INSTALL, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script, *arguments], env={**offline(), **variables}, capture_output=True, text=True, timeout=300)


@dataclass
class Installed:
    """The files that install.sh has created below a prefix, and its output."""

    prefix: Path
    wheel: Path
    output: str = ""
    files: dict[str, int] = field(default_factory=dict)

    @property
    def unit(self) -> Path:
        return self.prefix / "etc/systemd/system/vllm-gateway.service"

    @property
    def config(self) -> Path:
        return self.prefix / "etc/vllm-gateway/gateway.yaml"

    @property
    def key(self) -> str:
        """The key that was printed."""
        return str(re.findall(r"^sk-\S+$", self.output, re.MULTILINE)[0])

    def sample(self) -> dict[str, int]:
        """Every file and when it was written."""
        return {str(file): file.lstat().st_mtime_ns for file in self.prefix.rglob("*") if "__pycache__" not in file.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    wheel, _ = build(tmp_path_factory.mktemp("dist"))
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:  # a short path: unix sockets allow 107 bytes
        one = Installed(Path(folder) / "root", wheel)
        done = installing("--prefix", one.prefix, "--wheel", wheel)
        assert done.returncode == 0, done.stdout + done.stderr
        one.output = done.stdout
        yield one


# The unit, as it is written


def test_systemd_has_nothing_to_say_about_the_unit(installed: Installed) -> None:
    done = analyze("verify", installed.unit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_understands_the_drop_in_that_is_shown(installed: Installed, tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```ini\n(.*?)^```", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE | re.DOTALL)
    unit = Path(shutil.copy(installed.unit, tmp_path))
    more = tmp_path / f"{unit.name}.d"
    more.mkdir()
    for text, status in ((shown, 0), (shown.replace("ReadWritePaths", "ReadWritePath"), 1)):
        (more / "override.conf").write_text(text)
        assert len(analyze("verify", unit).stderr.splitlines()) == status


def test_systemd_finds_little_exposure() -> None:
    done = analyze("security", "--offline=true", f"--threshold={THRESHOLD}", UNIT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_stopped_in_order_and_in_time() -> None:
    unit, server = settings(UNIT), ServerSection()
    assert unit["KillMode"] == ["mixed"]  # SIGTERM for control alone
    assert seconds(unit, "TimeoutStopSec") >= server.linger + server.drain + STOP_GRACE + 30
    assert seconds(unit, "WatchdogSec") >= 30  # three signs of life in it, on a machine that is busy
    assert unit["NotifyAccess"] == ["main"] and unit["Type"] == ["notify"]


def test_gpus_stay_within_reach() -> None:
    hidden = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "PrivateUsers", "MemoryDenyWriteExecute", "ProcSubset"}
    assert not hidden & settings(UNIT).keys()


@pytest.mark.parametrize("script", [INSTALL, FOLDER / "vllm-gateway"], ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    done = subprocess.run([program("shellcheck"), "--norc", "--enable=all", "--exclude=SC2250,SC2310,SC2312", script],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stdout


# Installing


def test_the_first_installation_shows_a_key_once_and_keeps_its_hash(installed: Installed) -> None:
    assert installed.output.count(installed.key) == 1
    everything = b"".join(file.read_bytes() for file in installed.prefix.glob("etc/**/*") if file.is_file())
    assert installed.key.encode() not in everything
    [key] = load(installed.config).keys
    assert key.id == "admin"
    assert installed.config.stat().st_mode & 0o777 == 0o640 and installed.config.parent.stat().st_mode & 0o777 == 0o750


def test_a_second_installation_changes_nothing(installed: Installed) -> None:
    before = installed.sample()
    done = installing("--prefix", installed.prefix, "--wheel", installed.wheel)
    assert (done.returncode, done.stdout) == (0, "vllm-gateway is installed already, as it is here\n"), done.stderr
    assert installed.sample() == before


def test_a_unit_that_was_changed_is_put_in_order_and_a_configuration_is_left(installed: Installed) -> None:
    unit, config = installed.unit.read_text(), installed.config.read_text()
    installed.unit.write_text("[Unit]\n")
    installed.config.write_text(config + "# mine\n")
    done = installing("--prefix", installed.prefix, "--wheel", installed.wheel)
    assert done.returncode == 0 and "sk-" not in done.stdout, done.stderr
    assert (installed.unit.read_text(), installed.config.read_text()) == (unit, config + "# mine\n")


def test_a_dry_run_does_nothing(installed: Installed, tmp_path: Path) -> None:
    target = tmp_path / "root"
    done = installing("--prefix", target, "--wheel", installed.wheel, "--dry-run")
    assert done.returncode == 0 and not target.exists(), done.stderr
    assert f"+ write {target}/etc/systemd/system/vllm-gateway.service" in done.stdout.splitlines()
    assert "--require-hashes" in done.stdout and "sk-" not in done.stdout
    before = installed.sample()
    done = installing("--prefix", installed.prefix, "--uninstall", "--purge", "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("+ 'rm' '-rf'"), done.stderr
    assert installed.sample() == before


def test_a_dry_run_needs_no_wheel(tmp_path: Path) -> None:
    """A fresh clone has none, and what would be done does not depend on it."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    script = tmp_path / "deploy" / "systemd" / "install.sh"
    done = installing("--prefix", tmp_path / "root", "--dry-run", script=script)
    assert done.returncode == 0 and not (tmp_path / "root").exists(), done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("no wheel yet") and "make dist" in first
    assert f"+ write {tmp_path}/root/etc/systemd/system/vllm-gateway.service" in rest and "'--require-hashes'" in done.stdout
    real = installing("--prefix", tmp_path / "root", script=script)
    assert real.returncode == 1 and "build it with `make dist`" in real.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--wheel"], "--wheel needs a value"),
        (["--purge"], "--purge goes with --uninstall"),
        (["--prefix", "relative"], "an absolute path"),
        (["--prefix", "/"], "an absolute path"),
        (["--prefix", "/a#b"], "an absolute path"),
        (["--wheel", "/nowhere.whl", "--dry-run"], "/nowhere.whl: no such file"),
        (["--instal"], "unknown: --instal"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], says: str) -> None:
    done = installing(*arguments)
    assert done.returncode == 1 and done.stderr.startswith("install.sh: ") and says in done.stderr


# Upgrading


SETTINGS = "gateway/config/models.py"
FORMER = ("    workers: Workers = setting(", '    relays: Workers = setting("-", 1)\n    workers: Workers = setting(')
"""An earlier version, which has `relays`. This version names what replaces it."""
SERVE = "gateway/control/serve.py"
NEVER_READY = ("from __future__ import annotations\n", "from __future__ import annotations\n\nraise SystemExit(3)\n")


def changed(wheel: Path, folder: Path, module: str, change: tuple[str, str]) -> Path:
    """Write another version of a wheel, in which a text of a module is replaced."""
    folder.mkdir()
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy:
        for item in source.infolist():
            text = source.read(item)
            if item.filename == module:
                assert text.count(change[0].encode()) == 1, change
                text = text.replace(change[0].encode(), change[1].encode())
            copy.writestr(item, text)
    return target


@dataclass
class Upgraded:
    """An installation that runs as a service of the substitute for systemctl."""

    one: Installed
    variables: Mapping[str, str]
    pid_file: Path

    def install(self, wheel: Path) -> subprocess.CompletedProcess[str]:
        return installing("--prefix", self.one.prefix, "--wheel", wheel, variables=self.variables)

    @property
    def active(self) -> str:
        return os.readlink(self.one.prefix / "opt/vllm-gateway/bin")

    @property
    def pid(self) -> int:
        return int(self.pid_file.read_text())

    def served_by(self) -> str:
        """Return the program of the running gateway."""
        return next(part for part in psutil.Process(self.pid).cmdline() if part.startswith(str(self.one.prefix)))


@pytest.fixture
def upgraded(installed: Installed, tmp_path: Path) -> Iterator[Upgraded]:
    """Install an earlier version, with a setting that this version has renamed, and run it."""
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        one = Installed(Path(folder) / "root", installed.wheel)
        former = changed(installed.wheel, tmp_path / "former", SETTINGS, FORMER)
        assert installing("--prefix", one.prefix, "--wheel", former).returncode == 0
        config = one.config.read_text().replace("port: 8000", "port: 0").replace("port: 9090", "port: 0")
        one.config.write_text(config.replace("server:\n", "server:\n  relays: 1\n"))
        for part in ("run/systemd/system", "run/vllm-gateway", "var/lib/vllm-gateway", "var/cache/vllm-gateway"):
            (one.prefix / part).mkdir(parents=True, mode=0o700)
        pid_file = Path(folder) / "pid"
        path = f"{FOLDER.parents[1] / 'tests/deploy/standin'}:{os.environ['PATH']}"
        variables = {"PATH": path, "STANDIN_UNIT": str(one.unit), "STANDIN_PID": str(pid_file)}
        try:
            subprocess.run(["systemctl", "restart", "vllm-gateway"], env={**os.environ, **variables}, check=True, timeout=60)
            yield Upgraded(one, variables, pid_file)
        finally:
            subprocess.run(["systemctl", "stop", "vllm-gateway"], env={**os.environ, **variables}, check=True, timeout=60)


def test_a_new_version_that_refuses_the_configuration_changes_nothing(upgraded: Upgraded) -> None:
    active, pid, unit = upgraded.active, upgraded.pid, upgraded.one.unit.read_text()
    done = upgraded.install(upgraded.one.wheel)
    assert done.returncode == 1 and "was renamed; write `workers`" in done.stderr + done.stdout, done.stdout + done.stderr
    assert "nothing was changed" in done.stderr and "systemctl" not in done.stdout
    assert (upgraded.active, upgraded.pid, upgraded.one.unit.read_text()) == (active, pid, unit)
    assert psutil.pid_exists(pid)
    copy = upgraded.one.config.with_name("copy.yaml")
    copy.write_text(upgraded.one.config.read_text().replace("relays", "workers").replace("sha256:", "sha256:", 1))
    [command] = re.findall(r"`(\S+) check COPY`", done.stderr)
    shown = subprocess.run(
        [command, "check", copy], env=offline() | {"PATH": f"{Path(command).parent}:/usr/bin"}, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    copy.replace(upgraded.one.config)
    done = upgraded.install(upgraded.one.wheel)
    assert done.returncode == 0 and "vllm-gateway runs" in done.stdout, done.stdout + done.stderr
    assert upgraded.active != active and upgraded.pid != pid and upgraded.served_by().startswith(str(Path(upgraded.active).parent))
    assert Path(active).exists(), "to go back"


def test_the_variables_of_the_service_are_used_for_the_check(upgraded: Upgraded, tmp_path: Path) -> None:
    text = upgraded.one.config.read_text().replace("relays: 1\n", "workers: 1\n")
    upgraded.one.config.write_text(text.replace("port: 0}", "port: 0, token: {env: FROM_THE_SERVICE}}"))
    done = upgraded.install(upgraded.one.wheel)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_version_that_does_not_become_ready_is_rolled_back(upgraded: Upgraded, tmp_path: Path) -> None:
    upgraded.one.config.write_text(upgraded.one.config.read_text().replace("relays: 1\n", "workers: 1\n"))
    active, pid = upgraded.active, upgraded.pid
    done = upgraded.install(changed(upgraded.one.wheel, tmp_path / "never", SERVE, NEVER_READY))
    assert done.returncode == 1 and "the previous one runs again" in done.stderr, done.stdout + done.stderr
    assert upgraded.active == active and upgraded.pid != pid and psutil.pid_exists(upgraded.pid)
    assert upgraded.served_by().startswith(str(Path(active).parent))


# Running


def test_what_the_unit_starts_is_seen_from_its_start_to_its_end(installed: Installed) -> None:
    needs_systemd()
    unit = settings(installed.unit)
    config = installed.config.read_text()
    installed.config.write_text(config.replace("port: 8000", "port: 0").replace("port: 9090", "port: 0"))
    variables = dict(value.split("=", 1) for value in unit["Environment"])
    folders = {"StateDirectory": "var/lib", "CacheDirectory": "var/cache", "RuntimeDirectory": "run"}
    for name, parent in folders.items():  # as systemd makes them
        (installed.prefix / parent / unit[name][0]).mkdir(parents=True, mode=int(unit[f"{name}Mode"][0], 8))
    runtime = Path(variables["XDG_RUNTIME_DIR"])
    watchdog = int(seconds(unit, "WatchdogSec") * 1_000_000)
    [start], [reload] = unit["ExecStart"], unit["ExecReload"]
    with service_manager("@") as inbox:
        variables |= {"NOTIFY_SOCKET": inbox.address, "WATCHDOG_USEC": str(watchdog)}
        line: list[str | Path] = [sys.executable, confined.__file__, installed.unit, *start.split()]
        with gateway(installed.config.parent, None, ready=False, line=line, runtime=runtime, variables=variables) as one:
            inbox.wait_for("READY")
            assert one.get("/readyz").status_code == 200
            body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
            requested = httpx2.post(
                f"{one.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {installed.key}"}, timeout=60
            )
            assert requested.status_code == 200
            inbox.wait_for("WATCHDOG")
            assert {confined.filters(each.pid) for each in one.tree()} == {confined.filters(os.getpid()) + 1}
            shown = subprocess.run(
                [installed.prefix / "usr/local/bin/vllm-gateway", "status", "--json", "--config", installed.config],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert [model["id"] for model in json.loads(shown.stdout)["models"]] == ["demo/simulated"], shown.stderr
            inbox.forget()
            assert subprocess.run(reload.split(), env=variables, timeout=60).returncode == 0
            assert inbox.order("RELOADING", "READY") == ["RELOADING", "READY"]
            assert list((installed.prefix / "var/lib/vllm-gateway/logs").iterdir())
            inbox.forget()
            assert one.stop() == 0
            assert inbox.order("READY", "STOPPING") == ["STOPPING"]
            assert inbox.senders == {one.process.pid}
            wait_for(lambda: not list(runtime.glob("vllm-gateway-*")))


# And away with it; the last test of this file


def test_nothing_is_left_of_what_was_installed(installed: Installed) -> None:
    drop_in = installed.unit.with_name(f"{installed.unit.name}.d") / "override.conf"  # where `systemctl edit` writes
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nEnvironmentFile=/etc/vllm-gateway/secrets.env\n")
    done = installing("--prefix", installed.prefix, "--uninstall")
    assert done.returncode == 0 and "left in place" in done.stdout and str(drop_in.parent) in done.stdout, done.stderr
    assert drop_in.exists() and installed.config.exists() and not installed.unit.exists() and not (installed.prefix / "opt").exists()
    done = installing("--prefix", installed.prefix, "--uninstall", "--purge")
    assert done.returncode == 0, done.stderr
    assert [file for file in installed.prefix.rglob("*") if not file.is_dir()] == []
