"""The programs of docs/developers, each run as it stands, with the clients that it is for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.install import LOCKS, NODE, ROOT, environment, installed
from tests.support.process import SIMULATOR, Gateway, configuration, gateway
from tests.support.running import KEY

PAGES = sorted((ROOT / "docs" / "developers").glob("*.md"))
ENVIRONMENTS = {"anthropic": "current", "langchain_openai": "current", "litellm": "litellm"}
"""Where a package that a program needs is, if not in the project's own environment."""
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Program:
    """A block of a page that is run."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}-{self.language}"


PROGRAMS = [
    Program(page.stem, number, *match.groups())
    for page in PAGES
    for number, match in enumerate(_FENCE.finditer(page.read_text()), 1)
    if match[1] in ("python", "js", "sh")
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    args = {"reasoning-parser": "qwen3", "enable-auto-tool-choice": True, "tool-call-parser": "qwen3_coder", "sim-tokens": 40}
    model = {"id": "Qwen/Qwen3-0.6B", "aliases": ["qwen"], "launch": {"command": SIMULATOR, "args": args}}
    document = configuration(model)
    document["keys"][0]["limits"] = {"requests_per_minute": 6000, "tokens_per_minute": 6000000}
    with gateway(tmp_path_factory.mktemp("developers"), document) as one:
        yield one


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_runs(running: Gateway, program: Program, tmp_path: Path) -> None:
    words = command(program, tmp_path)
    own = {"OPENAI_BASE_URL": f"{running.url}/v1", "OPENAI_API_KEY": KEY, "HOME": str(tmp_path), "NO_PROXY": "*"}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    ended = subprocess.run(
        words, env={**os.environ, **own, **quiet}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() and '"error"' not in ended.stdout


def command(program: Program, folder: Path) -> list[str]:
    """The words that run a program. Skips the test when what it needs is not installed."""
    if program.language == "sh":
        return ["bash", "-ec", program.text.replace("curl ", "curl --fail-with-body ")]
    if program.language == "js":
        return node(program.text, folder)
    imported = re.findall(r"^(?:import|from) (\w+)", program.text, re.MULTILINE)
    name = next((ENVIRONMENTS[each] for each in imported if each in ENVIRONMENTS), None)
    return [sys.executable if name is None else python(name), "-c", program.text]


def python(name: str) -> str:
    place = environment(name)
    if not installed(place, LOCKS / f"{name}.lock"):
        pytest.skip(f"{place.name} is not installed (make clients)")
    return str(place / "bin" / "python")


def node(text: str, folder: Path) -> list[str]:
    program = shutil.which("node")
    if program is None or not installed(NODE / "node_modules", NODE / "package-lock.json"):
        pytest.skip("node or its packages are not installed (make clients)")
    (folder / "node_modules").symlink_to(NODE / "node_modules")
    (folder / "program.mjs").write_text(text)
    return [program, str(folder / "program.mjs")]


def test_every_theme_has_programs() -> None:
    assert {program.page for program in PROGRAMS} == {page.stem for page in PAGES}
