"""The table of attacks: enough rows, each with its own test that is run, and the pages that are made from it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.attacks.page import DOCS, ROOT, rendered
from tests.attacks.table import ATTACKS, Attack

ROWS = [attack for attacks in ATTACKS.values() for attack in attacks]
LEAST = 80


def duplicates(values: list[object]) -> list[object]:
    return [value for value, count in Counter(values).items() if count > 1]


def test_there_are_enough_attacks() -> None:
    assert len(ROWS) >= LEAST
    assert all(attack.name and attack.attempt and attack.expected for attack in ROWS)


def test_each_attack_has_its_own_name_in_its_area() -> None:
    assert duplicates([(area, attack.name) for area, attacks in ATTACKS.items() for attack in attacks]) == []


def test_each_attack_has_its_own_test() -> None:
    assert duplicates([attack.node for attack in ROWS]) == []
    whole = {attack.test for attack in ROWS if attack.case is None}
    assert [attack.node for attack in ROWS if attack.case is not None and attack.test in whole] == []


@pytest.fixture(scope="module")
def collected() -> frozenset[str]:
    """The tests that pytest finds, with and without their cases."""
    files = sorted({attack.node.partition("::")[0] for attack in ROWS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    nodes = [line for line in found.stdout.splitlines() if "::" in line]
    return frozenset(nodes) | {node.partition("[")[0] for node in nodes}


@pytest.mark.parametrize("attack", ROWS, ids=lambda attack: attack.node)
def test_each_attack_is_tried(collected: frozenset[str], attack: Attack) -> None:
    assert attack.node in collected, "there is no such test, or it has no such case"
    marks = {mark.name for mark in getattr(attack.test, "pytestmark", ())}
    assert marks.isdisjoint({"skip", "skipif", "xfail"}), "an attack is tried everywhere"


def test_the_pages_are_made_from_the_table() -> None:
    for name, text in rendered().items():
        assert (DOCS / name).read_text() == text, "run python -m tests.attacks"
