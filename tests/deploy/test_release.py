"""A release: its files, its operation in an empty environment, and its bill of materials."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from gateway import __version__
from tests.deploy.install import ROOT, tool
from tests.deploy.released import build, environment, locked_versions, offline, ran
from tests.support.process import configuration, gateway, wait_for

Release = tuple[Path, Path]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def tracked() -> dict[str, bytes]:
    """The tree's files by name, without what git ignores."""
    if not ROOT.joinpath(".git").exists():
        pytest.skip("this is no git checkout")
    names = ran("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT).split("\0")
    return {name: (ROOT / name).read_bytes() for name in names if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def unpacked(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution's tree."""
    folder = tmp_path_factory.mktemp("source")
    ran("tar", "--extract", "--file", release[1], folder=folder)
    return folder / f"vllm_gateway-{__version__}"


# Contents


def test_the_wheel_has_every_file_of_both_packages_and_the_documents_that_users_need(release: Release, tracked: dict[str, bytes]) -> None:
    with zipfile.ZipFile(release[0]) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {name: data for name, data in tracked.items() if name.startswith(("gateway/", "upstream/"))}
    shipped = {name: data for name, data in tracked.items() if re.fullmatch(r"docs/.*\.(md|png|svg)", name)}
    left_out = {f"docs/{name}.md" for name in ("design", "development", "fuzzing", "mutants", "release", "testing")}
    assert found == expected | {f"gateway/{name}": data for name, data in shipped.items() if name not in left_out}


def test_the_source_distribution_has_the_whole_tree(unpacked: Path, tracked: dict[str, bytes]) -> None:
    found = {str(file.relative_to(unpacked)): file.read_bytes() for file in unpacked.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert found.pop("PKG-INFO")
    assert found.keys() == tracked.keys()
    assert found == tracked
    assert unpacked.joinpath("deploy/systemd/install.sh").stat().st_mode & 0o111


def test_the_version_is_declared_once(release: Release) -> None:
    assert [file.name for file in release] == [f"vllm_gateway-{__version__}-py3-none-any.whl", f"vllm_gateway-{__version__}.tar.gz"]
    chart = yaml.safe_load((ROOT / "deploy/helm/vllm-gateway/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__


def test_the_source_distribution_makes_the_same_wheel(release: Release, unpacked: Path, tmp_path: Path) -> None:
    wheel, _ = build(tmp_path, unpacked)
    assert wheel.read_bytes() == release[0].read_bytes()


def test_the_source_distribution_can_be_tested(unpacked: Path) -> None:
    tests = ["tests/test_imports.py", "tests/test_lock.py", "tests/gateway/auth/test_keys.py"]
    output = ran(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, folder=unpacked)
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output


# That it works


@pytest.fixture(scope="module", params=["wheel", "source distribution"])
def programs(request: pytest.FixtureRequest, release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment that contains only the wheel or only the source distribution."""
    return environment(tmp_path_factory.mktemp("environment"), release[request.param != "wheel"])


def test_what_is_installed_is_what_is_locked(programs: Path) -> None:
    listed = ran(
        sys.executable, "-m", "pip", "--python", programs / "python", "list", "--format", "json", folder=programs, environ=offline()
    )
    found = {each["name"].lower().replace("_", "-").replace(".", "-"): each["version"] for each in json.loads(listed)}
    assert found.pop("vllm-gateway") == __version__
    locked = locked_versions()
    assert found == {name: locked[name] for name in found}


def test_the_demo_works_there(programs: Path, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed (Debian: curl)")
    with gateway(tmp_path, None, line=(programs / "vllm-gateway", "demo"), seconds=90) as one:
        command = wait_for(lambda: re.search(r"^curl .*$", one.log, re.MULTILINE))[0]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and '"choices"' in done.stdout, done.stdout + done.stderr
        for page in (f"{one.url}/portal", f"http://127.0.0.1:{one.admin}/console"):
            assert "<script" in httpx2.get(page, timeout=60).text
        assert one.named(str(programs.parent)) and not one.named(str(ROOT))


def test_the_ledger_finds_its_migrations_there(programs: Path, tmp_path: Path) -> None:
    simulator: dict[str, Any] = {"id": "sim/one", "launch": {"command": ["vllm-gateway", "simulate"]}}
    config = configuration(simulator) | {"ledger": "sqlite:///usage.db"}
    program = programs / "vllm-gateway"
    with gateway(tmp_path, config, line=(program, "serve", tmp_path / "gateway.yaml"), seconds=90) as one:
        assert one.request().status_code == 200
    shown = json.loads(ran(program, "usage", "--config", tmp_path / "gateway.yaml", "--format", "json", folder=tmp_path))
    assert [row["key"] for row in shown["usage"]] == ["team-a"]


# Bill of materials


def test_the_bill_of_materials_is_what_the_lock_says(release: Release, tmp_path: Path) -> None:
    if tool("cyclonedx") is None:
        pytest.skip("cyclonedx-py is not installed (make deploy-tools)")
    wheel = Path(shutil.copy(release[0], tmp_path))
    ran(sys.executable, ROOT / "deploy" / "sbom.py", wheel, folder=tmp_path, environ=offline())  # it validates what it writes
    bill = json.loads((tmp_path / f"vllm-gateway-{__version__}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == ("vllm-gateway", __version__)
    listed = {each["name"].lower().replace("_", "-").replace(".", "-"): each for each in bill["components"]}
    locked = locked_versions()
    assert {name: each["version"] for name, each in listed.items()} == {name: locked[name] for name in listed}
    assert {"uvicorn", "orjson", "pydantic", "sqlalchemy", "opentelemetry-sdk"} <= listed.keys()
    assert all(each["purl"].startswith("pkg:pypi/") for each in listed.values())
    assert not {"pytest", "mypy", "ruff"} & listed.keys()
    assert str(ROOT) not in json.dumps(bill) and str(tmp_path) not in json.dumps(bill)
