"""An object reads its own attributes without a default. A compiled object has each typed attribute from the start, with another value."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def reads_with_a_default(source: str) -> list[int]:
    """Return the lines of ``getattr(self, name, default)`` and ``hasattr(self, name)``."""
    calls = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call))
    shown = ((each.lineno, ast.unparse(each.func), [ast.unparse(argument) for argument in each.args]) for each in calls)
    return [
        line
        for line, called, arguments in shown
        if arguments[:1] == ["self"] and (called == "hasattr" or (called == "getattr" and len(arguments) == 3))
    ]


def test_a_default_is_found() -> None:
    assert reads_with_a_default("getattr(self, 'a', 0.0)\ngetattr(self, 'a')\ngetattr(other, 'a', 1)\nhasattr(self, 'b')\n") == [1, 4]


def test_no_object_reads_an_attribute_of_its_own_with_a_default() -> None:
    files = [*ROOT.glob("gateway/**/*.py"), *ROOT.glob("upstream/**/*.py")]
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := reads_with_a_default(path.read_text()))} == {}
