"""Every page opens with a sentence that says what it lets the reader do, and is short enough to be read once."""

from __future__ import annotations

import re
from pathlib import Path

from tests.documents.blocks import DOCS, ROOT, identity
from tests.support.rows import each_row

LONGEST = 2500
REFERENCES = {
    DOCS / "api.md": "generated: every route with its fields",
    DOCS / "configuration.md": "every setting",
    DOCS / "metrics.md": "every metric",
    DOCS / "mutants.md": "generated: every module and every survivor",
    DOCS / "security-core.md": "the rows of all searches and files of the trusted core",
}
"""Longer pages, which are looked up and not read, and what they list."""
_PURPOSE = re.compile(r"\b(?:This page|These pages|It) lets? you \w+")


def length(page: Path) -> int:
    """Return the number of words as ``wc -w`` counts them."""
    return len(page.read_text().split())


@each_row("page", [page for page in sorted(DOCS.rglob("*.md")) if page not in REFERENCES], ids=identity)
def test_a_page_can_be_read_once(page: Path) -> None:
    assert length(page) <= LONGEST, "split the page by task, or list it as a reference"


def test_the_references_are_long_pages() -> None:
    assert {identity(page): length(page) for page in REFERENCES if length(page) <= LONGEST} == {}


@each_row("page", sorted(DOCS.rglob("*.md")), ids=identity)
def test_a_page_opens_with_its_purpose(page: Path) -> None:
    opening = page.read_text().partition("\n\n")[2]
    while opening.startswith("<!--"):
        opening = opening.partition("\n\n")[2]
    first = opening.partition("\n\n")[0]
    assert re.match(r"[A-Z]\w+ ", first), "the page starts with something other than a sentence"
    assert _PURPOSE.search(" ".join(re.split(r"(?<=[.:]) ", " ".join(first.split()))[:2])), (
        "the page does not say what it lets the reader do"
    )


def test_the_first_page_of_the_repository_opens_with_a_sentence() -> None:
    first = (ROOT / "README.md").read_text().split("\n\n")[1]
    assert first.endswith((".", ":"))
