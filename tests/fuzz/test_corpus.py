"""Every input that fuzzing began with, or found worth keeping, is handled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import CORPUS, TARGETS
from tests.support.examples import examples
from tests.support.rows import each_row

INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@each_row("path", INPUTS, ids=lambda path: str(path.relative_to(CORPUS)))
def test_an_input(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_inputs_and_they_are_few() -> None:
    assert {path.parent.name for path in INPUTS} == TARGETS.keys()
    assert sum(path.stat().st_size for path in INPUTS) < 100_000


@settings(deadline=None, max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_are_changed_a_little(name: str, data: st.DataObject) -> None:
    """A piece of an input replaced by other bytes, or by a piece of another input."""
    known = [path.read_bytes() for path in INPUTS if path.parent.name == name]
    text = data.draw(st.sampled_from(known))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    other = data.draw(st.sampled_from(known))
    piece = data.draw(st.binary(max_size=20) | st.integers(0, len(other)).map(lambda at: other[at : at + 30]))
    TARGETS[name](text[:start] + piece + text[end:])
