"""Where a page is followed: a new folder, network and processes, in which the usual ports are free.

Owns the script that a page becomes: its blocks in their order, in one shell. The rules: the commands are run as they are written, in
what looks like a clone of the project; a page that starts a gateway begins with nothing and has its YAML files saved as it comes to
them, any other page finds a gateway running; in the end nothing of it is left.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.install import LOCKS, NODE, environment, installed
from tests.documents.blocks import ROOT, Block, Fate, blocks_of
from tests.support.running import KEY

HERE = Path(__file__).resolve().parent
OWN = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Namespaces: the loopback interface's ports are the page's, and its processes end with it."""
SECONDS = 500
SPEECH = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0"
"""A recording of the reader's, of no length."""
SHELLS = ("sh", "bash")
ENVIRONMENTS = {"anthropic": "current", "langchain_openai": "current", "litellm": "litellm"}
"""Packages that are not in the project's own environment, and those of the tests' clients that have them."""
_STARTS = re.compile(r"^(?:vllm-gateway (?:serve|demo)|make run)\b", re.MULTILINE)
_IMPORTS = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a page was followed. ``reached`` are the lines of the blocks that were begun."""

    code: int
    output: str
    reached: tuple[int, ...]


def possible() -> bool:
    """Whether this machine lets us have namespaces."""
    try:
        return subprocess.run([*OWN, "ip", "link", "set", "lo", "up"], capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


def run_here(page: Path) -> list[Block]:
    """The blocks of a page that are run."""
    return [block for block in blocks_of(page) if block.fate is Fate.RUN]


def starts_its_own(blocks: Sequence[Block]) -> bool:
    """Whether a page starts a gateway."""
    return any(block.language in SHELLS and _STARTS.search(block.text) for block in blocks)


def follow(page: Path, target: Path) -> Followed:
    """Follow a page to its end, in the empty folder ``target``. Skips the test where something is not installed."""
    folder = _clone(target)
    (target / "script").write_text("\n".join(_script(page, folder)))
    arguments = [*OWN, "bash", str(target / "script")]
    with open(target / "said", "wb") as messages:
        code = subprocess.run(
            arguments, cwd=folder, env=_environ(target), stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, timeout=SECONDS
        ).returncode
    return Followed(code, (target / "said").read_text(), tuple(map(int, (target / "reached").read_text().split())))


def _clone(target: Path) -> Path:
    """Create a folder that looks like a clone, beside the programs that a reader has."""
    folder = target / "clone"
    for each in (folder, target / "home", target / "run", target / "tmp", target / "bin"):
        each.mkdir()
    for each in ROOT.iterdir():
        if not each.name.startswith(".") and each.name not in ("build", "gateway.yaml"):
            (folder / each.name).symlink_to(each)
    (folder / "node_modules").symlink_to(NODE / "node_modules")
    (folder / "speech.wav").write_bytes(SPEECH)
    (target / "home" / ".curlrc").write_text("silent\nshow-error\nfail-with-body\nmax-time = 60\n")
    real = Path(sys.executable).with_name("vllm-gateway")
    _program(target / "bin" / "vllm", f'shift; exec {shlex.quote(str(real))} simulate "$@"')
    _program(target / "bin" / "vllm-gateway", f'exec {shlex.quote(str(real))} "$@"')
    return folder


def _program(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def _environ(target: Path) -> dict[str, str]:
    folders = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp", "STAGE": "."}
    path = os.pathsep.join([str(target / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, "LANG": "C.UTF-8", "NO_PROXY": "*", "PYTHON": sys.executable} | {
        name: str((target / below).resolve()) for name, below in folders.items()
    }


def _script(page: Path, folder: Path) -> Iterator[str]:
    yield from ("set -euo pipefail", "ip link set lo up", ': >"$STAGE/reached"', f". {shlex.quote(str(HERE / 'hands.sh'))}")
    blocks = blocks_of(page)
    own = starts_its_own(run_here(page))
    if not own:
        yield f"cp {shlex.quote(str(HERE / 'gateway.yaml'))} gateway.yaml"
        yield from (f"export {name}={shlex.quote(value)}" for name, value in _GIVEN.items())
        yield "vllm-gateway serve gateway.yaml"
    for block in blocks:
        if block.fate is Fate.RUN:
            yield f'echo {block.line} >>"$STAGE/reached"; echo "--- {block} ($SECONDS s)"'
            yield _LANGUAGES.get(block.language, _shell)(block, folder)
        elif own and block.language == "yaml" and block.fate is Fate.READ:
            yield f"printf %s {shlex.quote(block.text)} >{shlex.quote(block.file)}"


_GIVEN = {
    "KEY": KEY,
    "OPENAI_API_KEY": KEY,
    "OPENAI_BASE_URL": "http://127.0.0.1:8000/v1",
    "ANTHROPIC_API_KEY": KEY,
    "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000",
}
"""The variables of an application's environment."""


def _shell(block: Block, folder: Path) -> str:
    return block.text.replace("sk-...", KEY).replace("MODEL", "qwen")  # the reader's own


def _python(block: Block, folder: Path) -> str:
    (folder / (name := f"shown-{block.line}.py")).write_text(block.text)
    return f"{shlex.quote(_interpreter(block))} {name}"


def _interpreter(block: Block) -> str:
    wanted = {ENVIRONMENTS[package] for package in _IMPORTS.findall(block.text) if package in ENVIRONMENTS}
    if not wanted:
        return sys.executable
    (name,) = wanted
    if not installed(environment(name), LOCKS / f"{name}.lock"):
        pytest.skip(f"{block}: the {name} clients are not installed (make clients)")
    return str(environment(name) / "bin" / "python")


def _node(block: Block, folder: Path) -> str:
    if not installed(NODE / "node_modules", NODE / "package-lock.json"):
        pytest.skip(f"{block}: the Node client is not installed (make clients)")
    (folder / (name := f"shown-{block.line}.mjs")).write_text(block.text)
    return f"node {name}"


_LANGUAGES = {"python": _python, "js": _node}
