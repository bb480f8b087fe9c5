"""The documents say what is so: what they show is run, and what they list is held against the code."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from gateway.config.models import Admin
from gateway.errors import ROWS, Refusal, anthropic_error
from gateway.metrics import FAMILIES, PREFIX
from gateway.routes import ROUTES
from tests.support.certificates import certificate
from tests.support.process import Gateway, configuration, gateway
from tests.support.running import KEY

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE = runpy.run_path(str(DOCS / "reference.py"))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\S+\.ya?ml)\n")
_SECRET = re.compile(r"\{(env|file): ([^}]+)\}")
_TABLE_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def file(self) -> str:
        """The name that the first line of a YAML file gives it."""
        named = _FILE_NAME.match(self.text)
        return named[1] if named else "gateway.yaml"


BLOCKS = [Block(page, *match.groups()) for page in PAGES for match in _FENCE.finditer(page.read_text())]


def blocks(*languages: str, page: Path | None = None) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and page in (None, block.page)]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def identity(value: object) -> str:
    return value.page.name if isinstance(value, Block) else getattr(value, "name", str(value))


def rows(page: Path) -> list[list[str]]:
    """The cells of every table's rows, without the backticks."""
    return [match[1].replace("`", "").split(" | ") for match in _TABLE_ROW.finditer(page.read_text())]


# The configuration

CONFIGURATIONS = [block for block in blocks("yaml") if block.file == "gateway.yaml"]
WHOLE = next(block for block in CONFIGURATIONS if block.page.name == "configuration.md")
ALTERNATIVES = re.findall(r"`(launch: \{command.*?\}|servers: \[.*?\])`", README.read_text())


def checked(folder: Path, text: str) -> str:
    """What ``check`` says of a file, with the files beside it and the secrets that it refers to."""
    for block in blocks("yaml"):
        if block.file != "gateway.yaml":
            (folder / block.file).write_text(block.text)
    secrets = _SECRET.findall(text)
    for kind, name in secrets:
        if kind == "file":
            (folder / name).write_text("a-secret\n")
    (folder / "gateway.yaml").write_text(text)
    if "tls:" in text:
        for file, name in zip(certificate(folder), ("tls.crt", "tls.key"), strict=True):
            file.rename(folder / name)
    for path in re.findall(r" (\./[\w./-]+)", text):
        (folder / path).mkdir(parents=True)
    program = folder / "bin" / "nvidia-smi"  # a machine with more GPUs than are spoken of
    program.parent.mkdir()
    listed = "".join(f"GPU {number}: one (UUID: GPU-{number})\n" for number in range(8))
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
    program.chmod(0o755)
    environ = os.environ | {name: "a-secret" for kind, name in secrets if kind == "env"}
    environ["PATH"] = f"{program.parent}{os.pathsep}{environ['PATH']}"
    words = [str(BIN / "vllm-gateway"), "check", "gateway.yaml"]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=identity)
def test_a_shown_configuration_is_fine_and_does_all_it_says(tmp_path: Path, block: Block) -> None:
    said = checked(tmp_path, block.text)
    assert said.startswith("gateway.yaml is fine: ") and said.endswith(", 0 notes\n")


@pytest.mark.parametrize("written", ALTERNATIVES)
def test_the_other_ways_to_servers_are_fine_too(tmp_path: Path, written: str) -> None:
    text = next(block.text for block in CONFIGURATIONS if block.page == README)
    changed = re.sub(r"launch: \{\}.*", written, text)
    assert changed != text
    assert checked(tmp_path, changed).startswith("gateway.yaml is fine: ")


def test_the_whole_file_shows_every_setting() -> None:
    shown = set(paths(yaml.safe_load(WHOLE.text), ""))
    assert {setting.path for group in REFERENCE["groups"]() for setting in group.settings} - shown == set()


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


def test_the_scraped_port_is_the_default_one() -> None:
    (prometheus,) = (yaml.safe_load(block.text) for block in blocks("yaml") if block.file == "prometheus.yml")
    admin = Admin()
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": [f"{admin.host}:{admin.port}"]}]


# Lists


def test_the_table_of_errors_is_the_codes() -> None:
    told = {cells[2]: (int(cells[0]), cells[1]) for cells in rows(DOCS / "errors.md") if len(cells) == 5 and cells[0].isdigit()}
    assert told == {code: (row.status, row.type) for code, row in ROWS.items()}
    assert all(len(cell) > 3 for cells in rows(DOCS / "errors.md") if len(cells) == 5 and cells[0].isdigit() for cell in cells[3:])


def test_operators_are_told_of_every_code() -> None:
    told = {cells[0]: cells[1:] for cells in rows(DOCS / "operators" / "troubleshooting.md") if cells[0] in ROWS}
    assert set(told) == set(ROWS)
    assert all(len(cells) == 3 and all(len(cell) > 3 for cell in cells) for cells in told.values())


def test_the_table_of_anthropics_types_is_the_codes() -> None:
    told = {cells[0]: cells[1] for cells in rows(DOCS / "errors.md") if len(cells) == 2}
    for code, row in ROWS.items():
        expected = told.get(str(row.status)) or told[f"other {row.status // 100}xx"]
        assert anthropic_error(Refusal(code, "-"))["error"]["type"] == expected, code


def test_the_table_of_metrics_is_the_codes() -> None:
    told = {cells[0]: (cells[1], cells[2]) for cells in rows(DOCS / "metrics.md") if cells[0].startswith(PREFIX)}
    assert told == {PREFIX + name: (family.kind, ", ".join(family.labels) or "none") for name, family in FAMILIES.items()}


def test_no_other_metric_is_spoken_of() -> None:
    known = {PREFIX + name + end for name in FAMILIES for end in ("", "_bucket", "_sum", "_count")}
    for page in PAGES:
        assert set(re.findall(rf"\b{PREFIX}\w+", page.read_text())) - known == set(), page.name


def test_every_route_that_errors_speak_of_exists() -> None:
    assert set(re.findall(r"/v1/(?:chat/)?\w+", (DOCS / "errors.md").read_text())) - set(ROUTES) == {"/v1/models"}


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("block", blocks("json"), ids=identity)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


# Commands and links


def written_commands(word: str) -> set[str]:
    """What stands behind a command's name in the blocks for a shell and between backticks."""
    texts = [block.text for block in blocks("sh")] + [code for page in PAGES for code in re.findall(r"`([^`\n]+)`", prose(page))]
    return {found.strip() for text in texts for found in re.findall(rf"(?:^|\n|\s\[){word}[ ,]+([a-z][a-z-]*(?: [a-z]+)?)", text)}


@pytest.mark.parametrize("command", sorted(written_commands("vllm-gateway")))
def test_a_shown_command_exists(command: str) -> None:
    words = command.split()
    group = words[:2] if words[0] == "keys" else words[:1]
    done = subprocess.run([BIN / "vllm-gateway", *group, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_shown_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {command.split()[0] for command in written_commands("make")}
    assert shown >= {"run", "test"} and shown <= targets


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# What is run


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The README's configuration with the stand-in it names, on free ports and with a known key."""
    shown = yaml.safe_load(next(block.text for block in CONFIGURATIONS if block.page == README))
    model: dict[str, Any] = shown["models"][0]
    stand_in = next(yaml.safe_load(written) for written in ALTERNATIVES if written.startswith("launch"))
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PATH", str(BIN), prepend=os.pathsep)
        with gateway(tmp_path_factory.mktemp("readme"), configuration(model | stand_in)) as one:
            yield one


def adapted(text: str, one: Gateway) -> str:
    """A text for the default ports, for those of a running gateway."""
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{one.data}").replace("127.0.0.1:9090", f"127.0.0.1:{one.admin}")


def ran(one: Gateway, *words: str | Path) -> str:
    environ = os.environ | {"KEY": KEY, "NO_PROXY": "*"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curls() -> list[str]:
    lines = "\n".join(block.text for block in blocks("sh", page=README)).replace("\\\n", "").splitlines()
    return [line for line in lines if line.startswith("curl ")]


CURL_SAYS = {"/v1/chat/completions": '"choices"', "/metrics": "vllm_gateway_requests_total{", "/status": '"relays"', "/readyz": "ok"}


@pytest.mark.parametrize("command", curls(), ids=lambda command: command.split()[1])
def test_a_curl_line_works(running: Gateway, command: str) -> None:
    path = re.sub(r"http://[^/]+", "", command.split()[1])
    assert CURL_SAYS[path] in ran(running, "bash", "-c", adapted(command, running).replace("curl ", "curl -sS --fail ", 1))


def test_every_curl_line_is_tried() -> None:
    assert len(curls()) == len(CURL_SAYS)


@pytest.mark.parametrize("block", blocks("python", page=README), ids=["plain", "streaming"])
def test_a_python_snippet_works(running: Gateway, block: Block) -> None:
    before = running.metric('vllm_gateway_requests_total{code="200",endpoint="/v1/chat/completions",model="Qwen/Qwen3-0.6B"}')
    assert len(ran(running, sys.executable, "-c", adapted(block.text, running)).split()) > 5
    after = running.metric('vllm_gateway_requests_total{code="200",endpoint="/v1/chat/completions",model="Qwen/Qwen3-0.6B"}')
    assert after == before + 1


def test_the_measurement_can_be_repeated(tmp_path: Path) -> None:
    (block,) = blocks("python", page=DOCS / "architecture.md")
    (tmp_path / "measure.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, tmp_path / "measure.py"], env=os.environ | {"CALLS": "500"}, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r"(one process|multiprocess): counter [\d.]+, histogram [\d.]+\n" * 2, done.stdout), done.stderr
