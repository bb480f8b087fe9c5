"""The cursors of pages: each leads to its position, and no other text is one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.store.cursor import PAGE, cursor_to, page_length, position_of

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(texts)
def test_a_cursor_leads_to_its_position(position: str) -> None:
    assert position_of(cursor_to(position)) == position


@given(st.text())
def test_any_text_is_a_cursor_or_refused(text: str) -> None:
    with suppress(ValueError):
        assert "\0" not in position_of(text)


@pytest.mark.parametrize("text", ["!", "A", "AA", "_w", "YQ!", "YQ YQ", "é"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cursor: "):
        position_of(text)


def test_a_page_has_from_1_to_1000_entries() -> None:
    assert (page_length(None), page_length("1"), page_length("1000")) == (PAGE, 1, 1000)
    for text in ("0", "1001", "-1", "1.0", "", "x", "١", "00001"):
        with pytest.raises(ValueError, match="limit: "):
            page_length(text)
