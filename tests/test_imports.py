"""The order of the packages: each imports only packages before it, ``gateway`` imports ``upstream``, and a worker stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
    "gateway.api",
    "gateway.snapshot",
    "gateway.auth",
    "gateway.config",
    "gateway.key_management",
    "gateway.telemetry",
    "gateway.admission",
    "gateway.limits",
    "gateway.ledger",
    "gateway.client",
    "gateway.proxy",
    "gateway.worker",
    "gateway.check",
    "gateway.fleet",
    "gateway.admin",
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


def test_every_package_has_its_place_in_the_order() -> None:
    folders = {
        f"{path.parent.parent.name}.{path.parent.name}" for root in ("gateway", "upstream") for path in ROOT.glob(f"{root}/*/__init__.py")
    }
    assert folders == set(ORDER)


def test_a_package_imports_only_packages_before_it() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules()
        if (mine := package(module)) is not None
        for name in imported(path)
        if (theirs := package(name)) is not None and ORDER.index(theirs) > ORDER.index(mine)
    ]
    assert wrong == [], "move the constant or the type down, or the module up"


def test_the_product_does_not_import_the_tests() -> None:
    assert [f"{module} imports {name}" for module, path in modules() for name in imported(path) if name.split(".")[0] == "tests"] == []


def test_a_worker_does_not_load_what_only_control_needs() -> None:
    heavy = ["pydantic", "yaml", "prometheus_client", "httpx2", "typer", "rich"]
    code = f"import sys, gateway.worker.process; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
