"""A test over the rows of a table fails with all rows that fail, by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rows import each_row

FAILING = [1, 3, 5]


def test_every_failing_row_is_named() -> None:
    tried = []

    @each_row("number", range(6))
    def check(number: int) -> None:
        tried.append(number)
        assert number not in FAILING

    with pytest.raises(ExceptionGroup, match="3 of 6 rows") as raised:
        check()
    assert tried == list(range(6))
    assert [error.__notes__ for error in raised.value.exceptions] == [[f"in the row {number}"] for number in FAILING]


@each_row(("left", "right"), [pytest.param(1, 1, id="same"), (2, 2)])
@each_row("sign", ["+", "-"], ids=str)
def test_tables_are_multiplied_and_fixtures_are_given(tmp_path: Path, left: int, right: int, sign: str) -> None:
    assert tmp_path.is_dir() and left == right and sign in "+-"


def test_a_table_has_rows() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        each_row("number", [])
