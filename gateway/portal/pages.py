"""The pages of the portal: their names, titles, templates and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from starlette.responses import HTMLResponse

from gateway.pages.render import render


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the portal. ``scripts`` are those in addition to the one of all pages."""

    title: str
    template: str
    scripts: tuple[str, ...]


START = "/portal"

PAGES: Mapping[str, Page] = MappingProxyType(
    {
        START: Page("Models", "portal/models.html", ("portal/models.js",)),
        "/portal/playground": Page("Playground", "portal/playground.html", ("portal/markdown.js", "portal/playground.js")),
        "/portal/usage": Page("Usage", "portal/usage.html", ("pages/usage.js", "portal/usage.js")),
        "/portal/keys": Page("Keys", "portal/keys.html", ("portal/keys.js",)),
        "/portal/connect": Page("Connect", "portal/connect.html", ("portal/connect.js",)),
    }
)
"""The pages by path, in the order of the navigation."""


@cache
def page(path: str, *, signs_in: bool) -> HTMLResponse:
    """Return the page of a path of ``PAGES``. ``signs_in``: whether people can sign in. All requests get the same bytes."""
    shown = PAGES[path]
    return render(
        shown.template,
        "pages/components.css",
        "portal/portal.css",
        "pages/components.js",
        "portal/portal.js",
        *shown.scripts,
        headers={"cache-control": "no-store"},
        area="portal",
        start=START,
        pages=PAGES,
        path=path,
        page_title=shown.title,
        signs_in=signs_in,
    )
