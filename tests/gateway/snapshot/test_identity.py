"""Distinct subjects have distinct texts, whatever their names contain."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.snapshot.identity import subject_id, subject_prefix
from tests.support.examples import examples

NAMES = st.text("ab/%2F5", min_size=1, max_size=6)
PAIRS = st.tuples(NAMES, NAMES)


@settings(max_examples=examples(1000))
@given(PAIRS, PAIRS)
@example(("a", "b/c"), ("a/b", "c"))
@example(("a/b", "c"), ("a%2Fb", "c"))
def test_distinct_subjects_have_distinct_texts(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (subject_id(*one) == subject_id(*other)) == (one == other)


@given(PAIRS)
def test_a_row_key_starts_with_the_prefix_of_its_entry_alone(pair: tuple[str, str]) -> None:
    entry, subject = pair
    assert subject_id(entry, subject).startswith(subject_prefix(entry))
    assert not subject_id(entry + "x", subject).startswith(subject_prefix(entry))
