"""The order of the packages: each imports only packages before it, ``gateway`` imports ``upstream``, and a worker stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent

ORDER = (
    "upstream.http",
    "upstream.balancing",
    "upstream.vllm",
    "upstream.launcher",
    "upstream.discovery",
    "upstream.simulator",
    "gateway.system",
    "gateway.pages",
    "gateway.portal",
    "gateway.console",
    "gateway.api",
    "gateway.snapshot",
    "gateway.access",
    "gateway.auth",
    "gateway.config",
    "gateway.key_management",
    "gateway.telemetry",
    "gateway.admission",
    "gateway.limits",
    "gateway.prompts",
    "gateway.continuation",
    "gateway.ledger",
    "gateway.store",
    "gateway.audit",
    "gateway.recording",
    "gateway.usage",
    "gateway.sign_in",
    "gateway.self_service",
    "gateway.notices",
    "gateway.client",
    "gateway.proxy",
    "gateway.worker",
    "gateway.check",
    "gateway.fleet",
    "gateway.admin",
    "gateway.monitoring",
    "gateway.control",
    "gateway.cli",
)
"""The packages, bottom-up."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted([*ROOT.glob("gateway/**/*.py"), *ROOT.glob("upstream/**/*.py")]):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(module: str) -> str | None:
    """Return the entry of ``ORDER`` that a module or an imported name belongs to."""
    name = ".".join(module.split(".")[:2])
    return name if name in ORDER else None


def target(name: str, files: Container[str]) -> str:
    """Return the module that an imported name is or belongs to."""
    return name if name in files else name.rpartition(".")[0]


def test_every_package_has_its_place_in_the_order() -> None:
    folders = {
        f"{path.parent.parent.name}.{path.parent.name}" for root in ("gateway", "upstream") for path in ROOT.glob(f"{root}/*/__init__.py")
    }
    assert folders == set(ORDER)


def test_the_table_of_the_architecture_has_this_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Packages\n")[2].partition("\n## ")[0]
    assert tuple(path.replace("/", ".") for path in re.findall(r"^\| \[(\w+/\w+)\]", page, re.MULTILINE)) == ORDER


def test_a_package_imports_only_packages_before_it() -> None:
    wrong = [
        f"{module} imports {name}, and {theirs} comes after {mine}"
        for module, path in modules()
        if (mine := package(module)) is not None
        for name in imported(path)
        if (theirs := package(name)) is not None and ORDER.index(theirs) > ORDER.index(mine)
    ]
    hint = "Move the constant or the type to an earlier package, or the importing module to a later one (see ORDER)."
    assert not wrong, "\n".join([*wrong, hint])


def cycle(files: Mapping[str, Path]) -> list[str]:
    """Return modules that import each other in a circle, the first one again at the end; empty without a circle.

    Every import counts, those for type checkers and inside functions included: a reader of one of these files has to know them all.
    """
    graph = {module: {target(name, files) for name in imported(path)} & {*files} - {module} for module, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert not (found := cycle({module.removesuffix(".__init__"): path for module, path in modules()})), " is imported by ".join(found)


def test_a_circle_for_types_alone_is_found(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from second import Second\n")
    (tmp_path / "second.py").write_text("def use():\n    from third import Third\n")
    files = {name: tmp_path / f"{name}.py" for name in ("first", "second", "third")}
    files["third"].write_text("import json\n")
    assert cycle(files) == []
    files["third"].write_text("import first\n")
    assert set(cycle(files)) == {"first", "second", "third"}


def test_the_product_does_not_import_the_tests() -> None:
    assert [f"{module} imports {name}" for module, path in modules() for name in imported(path) if name.split(".")[0] == "tests"] == []


def test_a_worker_does_not_load_what_only_control_needs() -> None:
    heavy = ["pydantic", "yaml", "prometheus_client", "httpx2", "typer", "rich", "jinja2"]
    code = f"import sys, gateway.worker.process; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
