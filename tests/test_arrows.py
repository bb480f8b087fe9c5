"""The arrows between the packages: ``gateway`` imports ``upstream``, never the other way round; a worker stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted([*ROOT.glob("gateway/**/*.py"), *ROOT.glob("upstream/**/*.py")])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", [path for path in MODULES if path.is_relative_to(ROOT / "upstream")], ids=_name)
def test_upstream_knows_nothing_of_the_gateway(path: Path) -> None:
    assert [name for name in imported(path) if name.split(".")[0] in ("gateway", "prometheus_client")] == []


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_nothing_imports_the_tests(path: Path) -> None:
    assert [name for name in imported(path) if name.split(".")[0] in ("tests", "benchmarks")] == []


def test_a_worker_does_not_load_what_only_control_needs() -> None:
    heavy = ["pydantic", "yaml", "prometheus_client", "httpx2", "typer", "rich"]
    code = f"import sys, gateway.worker.process; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
