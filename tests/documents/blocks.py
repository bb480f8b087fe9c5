"""The fenced blocks of the pages, and what becomes of each: run, read by what reads such files, shown, or marked.

The rule: a block's language alone decides what becomes of it, unless a comment in the line above says why it cannot be run here:
``<!-- not run: it needs a cluster -->``. The text after ``not run: `` is one of REASONS.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
CHART = ROOT / "deploy" / "helm" / "vllm-gateway"
PAGES = [
    README,
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")),
    CHART / "README.md",
    *sorted(DOCS.rglob("*.md")),
]

REASONS = (
    "it needs a cluster",
    "it needs a GPU",
    "it needs Docker",
    "it needs another machine",
    "it needs a gateway with a store",
    "it needs the ID of a request",
    "it needs the ID of a recorded request",
    "the month must have ended",
    "it changes the machine",
    "it takes minutes",
    "it needs a package that the tests do not install",
)
_BLOCK = re.compile(r"^( *)(?:<!-- ([^\n]*?) -->\n *)?(`{3,})([^\n]*)\n(.*?)^ *\3$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\S+\.ya?ml)\n")


class Fate(Enum):
    """The treatment of a block."""

    RUN = "run"
    READ = "read"
    SHOWN = "shown"
    MARKED = "marked"


FATES = {
    "sh": Fate.RUN,
    "bash": Fate.RUN,
    "python": Fate.RUN,
    "js": Fate.RUN,
    "yaml": Fate.READ,
    "json": Fate.READ,
    "promql": Fate.READ,
    "nginx": Fate.READ,
    "ini": Fate.READ,
    "toml": Fate.READ,
    "text": Fate.SHOWN,
}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``line`` is that of its fence; ``comment`` what the comment above it says."""

    page: Path
    line: int
    language: str
    text: str
    comment: str | None

    def __str__(self) -> str:
        return f"{identity(self.page)}:{self.line}"

    @property
    def fate(self) -> Fate:
        """Raises KeyError for an unknown language."""
        return Fate.MARKED if self.reason is not None else FATES[self.language]

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        kind, _, reason = (self.comment or "").partition(": ")
        return reason if kind == "not run" else None

    @property
    def file(self) -> str:
        """The name that the first line of a YAML file gives it."""
        named = _FILE_NAME.match(self.text)
        return named[1] if named else "gateway.yaml"


def blocks_of(page: Path) -> list[Block]:
    """A page's blocks in their order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, match.start(3)) + 1, match[4].strip(), textwrap.dedent(match[5]), match[2])
        for match in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str, page: Path | None = None) -> list[Block]:
    """Return the blocks of some languages, of one page or of all."""
    return [block for block in BLOCKS if block.language in languages and page in (None, block.page)]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", page.read_text())


def identity(value: object) -> str:
    """Return the id of a block or a page in a parametrized test."""
    return str(value).removeprefix(f"{ROOT}/")
