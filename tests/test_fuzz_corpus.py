"""Every input that fuzzing began with, or found worth keeping, is handled."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.targets import CORPUS, TARGETS

INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: str(path.relative_to(CORPUS)))
def test_an_input(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_inputs_and_they_are_few() -> None:
    assert {path.parent.name for path in INPUTS} == TARGETS.keys()
    assert sum(path.stat().st_size for path in INPUTS) < 100_000
