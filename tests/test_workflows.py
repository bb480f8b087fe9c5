"""Templates, workflows and hooks for contributors: valid YAML, and commands that exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fuzz.differential.registry import TARGETS as DIFFERENTIAL
from tests.fuzz.targets import TARGETS as GUIDED

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def commands(workflow: Path) -> list[str]:
    """Return the commands that a workflow runs."""
    return [step["run"] for job in load(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


def exists(command: str) -> bool:
    """Return whether a command's program is in the tree: a target of make, a file, or a tool of the environment."""
    program, *arguments = shlex.split(command)
    if program == "make":
        return {argument for argument in arguments if "=" not in argument} <= TARGETS
    return (ROOT / program).exists()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_runs_what_exists(workflow: Path) -> None:
    loaded = load(workflow)
    assert loaded["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in loaded["jobs"].values())
    own = [command for command in commands(workflow) if command.startswith(("make", "."))]
    assert own
    assert [command for command in own if not exists(command)] == []


def test_every_supported_python_is_tested() -> None:
    matrix = load(ROOT / ".github/workflows/change.yml")["jobs"]["python"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: 3\.\d+", each)]
    assert set(classified) <= set(matrix) and project["requires-python"] == f">={matrix[0]}"


def test_the_workflows_run_every_check_of_a_change() -> None:
    assert {".ci/run", "make check", "make test", "make test-deep"} <= {command for file in WORKFLOWS for command in commands(file)}


def test_every_fuzz_target_runs_each_week() -> None:
    workflow = load(ROOT / ".github/workflows/fuzz.yml")
    assert workflow["jobs"]["fuzz"]["strategy"]["matrix"]["target"] == [*GUIDED, *DIFFERENTIAL]


@pytest.mark.parametrize("form", FORMS, ids=lambda file: file.name)
def test_an_issue_form_has_what_the_forge_requires(form: Path) -> None:
    loaded = load(form)
    if form.name == "config.yml":
        assert set(loaded) <= {"blank_issues_enabled", "contact_links"}
        return
    assert all(isinstance(loaded[field], str) for field in ("name", "description"))
    fields = [each for each in loaded["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)


def test_hooks_run_what_the_environment_has() -> None:
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "a hook would be downloaded"
    assert [hook["entry"] for hook in repository["hooks"] if not exists(hook["entry"])] == []
