"""The pages of a list: their length, and the cursor that leads to the next one. Pure."""

from __future__ import annotations

import re
from base64 import b64decode, urlsafe_b64encode

PAGE, MAX_PAGE = 100, 1000
"""Entries of a page: by default, and at most."""


def page_length(text: str | None) -> int:
    """Return the number of entries that a client wants. Raises ValueError with a message for the client."""
    if text is None:
        return PAGE
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_PAGE:
        raise ValueError(f"limit: expected a number from 1 to {MAX_PAGE}")
    return int(text)


def position_of(cursor: str) -> str:
    """Return the text after which a page begins; empty for the first page. Raises ValueError with a message for the client."""
    try:
        text = b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        text = "\0"
    if "\0" in text:  # PostgreSQL text cannot contain it
        raise ValueError("cursor: expected the next_cursor of an earlier page")
    return text


def cursor_to(position: str) -> str:
    """Return the cursor of the page that begins after a position."""
    return urlsafe_b64encode(position.encode()).decode().rstrip("=")
