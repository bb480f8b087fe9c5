"""The tables of the pages, and the messages of the code that pages quote."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.documents.blocks import ROOT

_TABLE_ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_POSITION = re.compile(r"\Agateway\.yaml(?::\d+)?: ")
_LEAST, _LEAST_PART = 13, 11
"""Characters that a message has outside its placeholders, and that a part of a shown message has, so that none is found by chance."""


def rows(page: Path) -> list[list[str]]:
    """The cells of every table's rows, without the backticks."""
    return [match[1].replace("`", "").split(" | ") for match in _TABLE_ROW.finditer(page.read_text())]


def table(page: Path, header: str) -> list[list[str]]:
    """Return the rows of the only table with this header, which is a line without its outer bars. The cells are as they are written."""
    tables = page.read_text().split(f"\n| {header} |\n")
    assert len(tables) == 2, f"{page} has {len(tables) - 1} tables with the header {header}"
    lines = tables[1].splitlines()
    assert re.fullmatch(r"[|:-]+", lines[0])
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:end]]


def codes(*cells: str) -> list[str]:
    """Return everything between backticks."""
    return [name for cell in cells for name in _CODE.findall(cell)]


@functools.cache
def messages() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return the texts in the code, and a pattern of each, in which a placeholder is any text."""
    templates = {
        tuple(part.value if isinstance(part, ast.Constant) else "\0" for part in getattr(node, "values", [node]))
        for folder in ("gateway", "upstream")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    texts = {"".join(map(str, template)) for template in templates}
    return tuple(
        (text, re.compile(".+?".join(re.escape(part) for part in text.split("\0"))))
        for text in texts
        if len(text.replace("\0", "")) >= _LEAST_PART and "\n\n" not in text
    )


def is_in_code(shown: str) -> bool:
    """Return whether a shown message is one of the code, or a part of it. An ellipsis in ``shown`` is any text."""
    shown = _POSITION.sub("", shown)
    parts = [part.strip() for part in re.split(r"…|[:;] ", shown) if len(part.strip()) >= _LEAST_PART]
    if any(part in text for part in parts for text, _ in messages()):
        return True
    found = (pattern.search(shown) for _, pattern in messages())
    return any(match is not None and len(match[0]) >= max(_LEAST, len(shown) / 4) for match in found)
