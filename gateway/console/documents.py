"""The documents of this version as pages of the console, without a network.

The rules: a page shows a file of this package and no data of the gateway, so it needs no token. Raw HTML in a file is dropped, so that only
this module writes markup. The path of a page is the path of its file, so links between files work as they are written.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING

from markupsafe import Markup
from starlette.responses import HTMLResponse

from gateway.console.pages import PAGES, START
from gateway.pages.shell import Page, shell

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

PREFIX = f"{START}/docs/"
FIRST = "index.md"
_FILES = ("console/document.css",)
_EXTERNAL = ("https://", "http://")
_MENTIONED = 3
"""Sections from which on a page has a list of them."""


@cache
def page(name: str, *, signs_in: bool) -> HTMLResponse | None:
    """Return the page of a document, such as ``operators/upgrades.md``, or without a name the list by task. None: it does not exist."""
    name = name or FIRST
    if name not in names():
        return None
    tokens = _renderer().parse((folder() / name).read_text(encoding="utf-8"))
    headings = list(_numbered(tokens))
    for token in tokens:
        token.children = list(_with_links(token.children or (), PurePosixPath(name))) if token.children else token.children
    sections = [(slug, text) for level, slug, text in headings if level == "h2"]
    return shell(
        "console",
        PAGES,
        PREFIX,
        signs_in=signs_in,
        page=Page("Documents" if name == FIRST else headings[0][2], "document", _FILES),
        content=Markup(_renderer().renderer.render(tokens, _renderer().options, {})),  # noqa: S704  escaped by the renderer
        sections=sections if len(sections) >= _MENTIONED else [],
        first=None if name == FIRST else PREFIX,
    )


@cache
def folder() -> Path:
    """Return the folder of the documents: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    return found if (found := package / "docs").is_dir() else package.parent / "docs"


@cache
def names() -> frozenset[str]:
    """Return the paths of the documents in the folder."""
    return frozenset(each.relative_to(folder()).as_posix() for each in folder().rglob("*.md"))


@cache
def _renderer() -> MarkdownIt:
    from markdown_it import MarkdownIt  # here, because most gateways never show a document

    made = MarkdownIt("commonmark").enable("table")
    for rule in ("html_block", "html_inline"):
        made.add_render_rule(rule, lambda *_: "")
    made.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>')
    made.add_render_rule("table_close", lambda *_: "</table></div>")
    return made


def _numbered(tokens: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Give each heading its anchor, and yield its level, anchor and text. The anchors are those of GitHub."""
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", following.content.lower()).replace(" ", "-")
            token.attrSet("id", slug)
            yield token.tag, slug, "".join(each.content for each in following.children or ())


def _with_links(tokens: Sequence[Token], name: PurePosixPath) -> Iterator[Token]:
    """Yield the parts of a line: images with their data, and no links to what is not shipped, such as the source."""
    opened: list[bool] = []
    for token in tokens:
        if token.type == "link_open":
            link = str(token.attrGet("href"))
            is_external = link.startswith(_EXTERNAL)
            opened.append(is_external or link.startswith("#") or normpath(name.parent / link.partition("#")[0]) in names())
            if is_external:
                token.attrSet("rel", "noreferrer")
        elif token.type == "image":
            token.attrSet("src", _data(normpath(name.parent / str(token.attrGet("src")))))
        if token.type not in ("link_open", "link_close") or (opened[-1] if token.type == "link_open" else opened.pop()):
            yield token


def _data(image: str) -> str:
    """Return an image as a URL that contains it, which the policy of pages permits."""
    kind, _ = mimetypes.guess_type(image)
    return f"data:{kind};base64,{base64.b64encode((folder() / image).read_bytes()).decode()}"
