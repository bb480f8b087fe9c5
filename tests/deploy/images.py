"""The images, built here by buildah as `make image` builds them, and unpacked where tests can run what is in them.

The rule: a build leaves two things of an image, its files and its configuration, in a folder that `git` ignores. They are used again
until one of their inputs changes; buildah's other files are removed when it is done.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from tests.deploy.install import ROOT, tool

FILES = {"image": "Dockerfile", "image-vllm": "Dockerfile.vllm"}
"""By the goal of make, what it builds."""
SOURCES = (
    ".dockerignore",
    "Makefile",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "deploy/docker",
    "gateway",
    "upstream",
    "tests/deploy/standin",
)
STANDIN = ROOT / "tests" / "deploy" / "standin"
"""The stand-in for vLLM in the base: a command `vllm` and a package of its interpreter."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDER = ROOT / ".venv-deploy-built"
_MARK = "complete"
_PROGRAM = """#!/bin/sh
set -e
export TMPDIR={folder}
mkdir -p /var/lib/containers
mount -t tmpfs none /var/lib/containers  # where it has a cache, whatever it is told
exec {command} "$@"
"""


@dataclass(frozen=True, slots=True)
class Image:
    """An image: ``root`` has its files, which must not be changed."""

    root: Path
    config: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """Its variables; without a PATH, the default of container runtimes."""
        return {"PATH": PATH} | dict(line.split("=", 1) for line in self.config["Env"])


def image(goal: str) -> Image:
    """Return the image that ``make GOAL`` builds. Skip the test if it cannot be built."""
    base = tool("base")
    if base is None:
        pytest.skip("what images are built on is not installed (make deploy-tools)")
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("images are built by root, with buildah (Debian: buildah)")
    digest = _digest(base)
    with _alone(FOLDER):
        if not (FOLDER / _MARK).exists() or (FOLDER / _MARK).read_text() != digest:
            for left in (FOLDER, *base.parent.glob("images-*")):  # by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            FOLDER.mkdir()
            _build(base, FOLDER)
            (FOLDER / _MARK).write_text(digest)
    return Image(FOLDER / goal, json.loads((FOLDER / f"{goal}.json").read_text()))


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Several processes share the tests' work."""
    with open(target.with_name(f"{target.name}.lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(base: Path) -> str:
    """Of everything that goes into the images, and of how they are built."""
    total = hashlib.sha256(base.with_name(".complete").read_bytes() + Path(__file__).read_bytes())
    for file in sorted(file for source in (*SOURCES, STANDIN) for file in _files(ROOT / source)):
        total.update(f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _files(target: Path) -> Iterable[Path]:
    found = target.rglob("*") if target.is_dir() else [target]
    return (file for file in found if file.is_file() and "__pycache__" not in file.parts)


def _build(base: Path, target: Path) -> None:
    """Both from one storage: the steps that they share are taken once."""
    with tempfile.TemporaryDirectory(prefix="images-", dir=base.parent) as name:
        buildah = Buildah(Path(name))
        buildah.make_base(base)
        configuration, volumes = pip_configuration()
        secret = buildah.folder / "pip.conf"
        secret.write_text(configuration)
        options = ["--isolation=chroot", "--format=docker", "--layers", f"--secret=id=pip,src={secret}", "--build-arg=BASE=localhost/base"]
        options += [f"--volume={path}:{path}:ro" for path in volumes]
        for goal in FILES:
            _run(["make", "--silent", goal, f"BUILD={' '.join([*buildah.prefix, 'bud', *options])}", "VERSION=tested"])
            tag = f"localhost/vllm-gateway{goal.removeprefix('image')}:tested"
            described = json.loads(buildah.run("inspect", "--type", "image", tag))
            (target / f"{goal}.json").write_text(json.dumps(described["Docker"]["config"], indent=1))
            buildah.unpack(tag, target / goal)


class Buildah:
    """A buildah that keeps what it has in one folder, and whose mounts end with each command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        driver = "overlay" if _overlays(folder) else "vfs"  # which copies everything for each step
        storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", driver]
        self.program = folder / "buildah"
        self.program.write_text(_PROGRAM.format(folder=shlex.quote(str(folder)), command=shlex.join(["buildah", *storage])))
        self.program.chmod(0o755)
        self.prefix = ["unshare", "--mount", "--", str(self.program)]

    def run(self, *arguments: str) -> str:
        """Its standard output, without the last line's end."""
        return _run([*self.prefix, *arguments]).strip()

    def make_base(self, archive: Path) -> None:
        """The image ``base``: a Debian, with what stands for vLLM in it."""
        container = self.run("from", "scratch")
        self.run("add", container, str(archive), "/")
        self.run("copy", container, str(STANDIN / "vllm"), "/usr/local/bin/vllm")
        self.run("copy", container, str(STANDIN / "vllm_standin.py"), "/usr/lib/python3/dist-packages/vllm_standin.py")
        self.run("commit", "--rm", container, "base")

    def unpack(self, tag: str, target: Path) -> None:
        """Put the files of an image into a folder."""
        container = self.run("from", "--pull-never", tag)
        script = f'cp -a "$({shlex.quote(str(self.program))} mount {container})" {shlex.quote(str(target))}'
        _run([*self.prefix[:3], "sh", "-c", script])


def _overlays(folder: Path) -> bool:
    """Whether the kernel can lay folders of this file system over one another."""
    lower, upper, work, merged = (folder / name for name in ("lower", "upper", "work", "merged"))
    for each in (lower, upper, work, merged):
        each.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    arguments = ["unshare", "--mount", "--", "mount", "-t", "overlay", "-o", options, "none", str(merged)]
    return subprocess.run(arguments, capture_output=True).returncode == 0


def _run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip_configuration() -> tuple[str, list[Path]]:
    """How pip is configured here, as a file, and the places of this machine that it names."""
    arguments = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    found = dict(_setting(line) for line in reversed(lines))  # the first of a name wins: the environment comes first
    text = "[global]\n" + "".join(f"{name} = {value}\n" for name, value in found.items())
    return text, sorted({path for value in found.values() for path in _folders(value)})


def _setting(line: str) -> tuple[str, str]:
    """``:env:.cert='/a/file'`` and ``global.cert='/a/file'`` are both ("cert", "/a/file")."""
    name, _, value = line.partition("=")
    return name.rpartition(".")[2], str(ast.literal_eval(value))


def _folders(value: str) -> Iterable[Path]:
    """The folders that a setting's words lead to, and those beside an index on disk, since its files may be there."""
    for argument in value.split():
        local = argument.startswith("file://")
        path = Path(url2pathname(urlsplit(argument).path)) if local else Path(argument)
        if path.is_absolute() and path.exists():
            folder = path if path.is_dir() else path.parent
            yield from (each for each in folder.parent.iterdir() if each.is_dir()) if local else [folder]
