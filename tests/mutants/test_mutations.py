"""Mutants are all the small changes of a module, and a trial notices what its tests notice."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import report
from tests.mutants.areas import AREAS
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.lua import lua_mutants
from tests.mutants.mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]


def unparsed(mutant: Mutant) -> str:
    assert isinstance(mutant.changed, ast.Module)
    return ast.unparse(mutant.changed)


def changes(source: str) -> list[str]:
    return [unparsed(mutant) for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("f(a < 1)", ["pass", "f(a <= 1)", "f(a < 2)"]),
        ("x = a and (not b)", ["pass", "x = a or not b", "x = a and b"]),
        ("x = a + b", ["pass", "x = a - b"]),
        ("def f():\n    return True", ["def f():\n    return None", "def f():\n    return False"]),
        ("if a.b:\n    raise E('no')", ["if not a.b:\n    raise E('no')", "if a.b:\n    pass"]),
        ("x = b'a'", ["pass", "x = b'ax'"]),
        ("a.b()", ["pass"]),
    ],
)
def test_each_kind_of_change(source: str, changed: list[str]) -> None:
    assert changes(source) == changed


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "from a import b",
        'def f(x: dict[int, int]) -> int:\n    """Text."""',
        "class P(Protocol):\n    x = 1",
        "if TYPE_CHECKING:\n    x = 1",
        "return None",
    ],
)
def test_what_is_for_readers_is_not_changed(source: str) -> None:
    assert changes(source) == []


def test_the_tree_of_a_mutant_has_one_change() -> None:
    source = (ROOT / "gateway/auth/keyring.py").read_text()
    original = ast.unparse(ast.parse(source)).splitlines()
    for mutant in mutants(source):
        changed = unparsed(mutant).splitlines()
        assert changed != original and abs(len(changed) - len(original)) <= 3


TRIAL = """
import ast, sys
from tests.mutants.mutations import mutants
from tests.mutants.trial import ROOT, tried
module, tests = "gateway/auth/keys.py", ["tests/gateway/auth/test_keys.py"]
source = (ROOT / module).read_text()
print(tried(module, ast.parse(source), tests, 300).killed, tried(module, next(mutants(source)).changed, tests, 300).killed)
"""


def test_a_trial_notices_what_a_test_notices() -> None:
    """The process of a trial has no modules of the project, so it is another one than this."""
    done = subprocess.run([sys.executable, "-c", TRIAL], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


WAITS = """
import ast
import re
from tests.mutants.trial import tried
waits = ast.parse("import threading\\nthreading.Event().wait()")
print(tried("gateway/auth/keys.py", waits, ["tests/gateway/auth/test_keys.py"], 300).killed)
"""


def test_a_trial_that_waits_for_what_never_comes_ends() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


SCRIPT = """
from tests.mutants.trial import ROOT, tried
module, tests = "gateway/limits/redis/calendar.lua", ["tests/gateway/limits/redis/test_store.py::test_the_calendar_of_the_store"]
source = (ROOT / module).read_text()
print(tried(module, source, tests, 300).killed, tried(module, source.replace("719468", "719469", 1), tests, 300).killed)
"""


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed (Debian: redis-server)")
def test_a_trial_reads_the_changed_script() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_modules_of_the_areas_and_their_tests_exist() -> None:
    modules = [(module, tested) for area in AREAS.values() for module, tested in area.modules.items()]
    arguments = [argument.removeprefix("--deselect=") for _, tested in modules for argument in tested.tests]
    tests = [argument.partition("::")[0] for argument in arguments if not argument.startswith("-")]
    assert [each for each in (*dict(modules), *tests) if not (ROOT / each).is_file()] == []


def test_the_report_has_the_stored_figures() -> None:
    assert report.PAGE.read_text() == report.rendered(report.stored())


def test_each_survivor_is_explained() -> None:
    """An explanation of a mutant that is noticed now is outdated. A sample may leave out explained mutants.

    A module outside the trusted core may have changed since its mutants were tried.
    """
    for area, rows in report.stored().items():
        for module, row in rows.items():
            if not report.is_current(module, row):
                continue
            survivors, changes = {tuple(each[1:]) for each in row["survivors"]}, {each[1:4] for each in report.mutants_of(area, module)}
            explained = EQUIVALENT.get(module, {}).keys() & (changes | survivors)
            assert survivors == explained if row["tried"] == row["mutants"] else survivors <= explained, module


def test_each_explanation_is_of_a_mutant() -> None:
    changes: dict[str, set[tuple[str, str, str]]] = {}
    for area, rows in report.stored().items():
        for module, row in rows.items():
            if "source" in row and report.is_current(module, row):
                changes.setdefault(module, set()).update(each[1:4] for each in report.mutants_of(area, module))
    explained = ((module, each) for module, rows in EQUIVALENT.items() if module in changes for each in rows)
    assert [(module, each) for module, each in explained if each not in changes[module]] == []


def test_the_changes_of_some_definitions() -> None:
    source = "x = 1\nclass A:\n    def f(self):\n        g()\n    def fg(self):\n        h()\ndef f():\n    i()"
    assert [each[:4] for each in mutants(source, ("A.f", "f"))] == [(4, "A.f", "g()", "pass"), (8, "f", "i()", "pass")]
    assert [each.where for each in mutants(source, ("A",))] == ["A.f", "A.fg"]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("if a < 1 then b() end", ["if a <= 1 then b() end", "if a < 2 then b() end"]),
        ("if a.b then c() end", ["if not a.b then c() end"]),
        ("  redis.call('DEL', key)", [""]),
        ("x = a and b or -1", ["x = a or b or -1", "x = a and b and -1", "x = a and b or -2"]),
        ("if wait > 0.000001 then", ["if wait >= 0.000001 then", "if wait > 1e-05 then"]),
        ("x = math.min(a, 'b < 1') .. c -- 2", ["x = math.max(a, 'b < 1') .. c -- 2"]),
    ],
)
def test_each_kind_of_change_of_a_script(source: str, changed: list[str]) -> None:
    assert [mutant.after for mutant in lua_mutants(source)] == changed


def test_the_text_of_a_changed_script_has_one_change() -> None:
    source = (ROOT / "gateway/limits/redis/common.lua").read_text()
    for mutant in lua_mutants(source):
        assert isinstance(mutant.changed, str)
        pairs = zip(source.splitlines(), mutant.changed.splitlines(), strict=True)
        assert [number for number, (before, after) in enumerate(pairs, 1) if before != after] == [mutant.line]


def test_the_tests_of_the_areas_exist() -> None:
    """A trial with a missing test would try no mutant."""
    arguments = {argument for area in AREAS.values() for tested in area.modules.values() for argument in tested.tests}
    named = {argument.removeprefix("--deselect=") for argument in arguments if argument.startswith(("tests/", "--deselect="))}
    for name in sorted(named):
        file, _, test = name.partition("::")
        assert test.partition("[")[0] in (ROOT / file).read_text(), name
