"""The pages of the console: their names, titles, templates and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from starlette.responses import HTMLResponse

from gateway.pages.render import render

START = "/console"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the console. Its template and its script have its name. ``shared``: other scripts, which run before its own."""

    title: str
    name: str
    shared: tuple[str, ...] = ()


_LIMITS = ("pages/usage.js", "console/limits.js")


PAGES: Mapping[str, Page] = MappingProxyType(
    {
        START: Page("Overview", "overview"),
        f"{START}/models": Page("Models", "models"),
        f"{START}/requests": Page("Requests", "requests"),
        f"{START}/keys": Page("Keys", "keys", _LIMITS),
        f"{START}/teams": Page("Teams", "teams", _LIMITS),
        f"{START}/people": Page("People", "people", _LIMITS),
        f"{START}/usage": Page("Usage", "usage", _LIMITS),
        f"{START}/audit": Page("Audit log", "audit"),
        f"{START}/configuration": Page("Configuration", "configuration"),
        f"{START}/system": Page("System", "system"),
    }
)
"""The pages by path, in the order of the navigation."""


@cache
def page(path: str, *, signs_in: bool) -> HTMLResponse:
    """Return the page of a path of ``PAGES``. ``signs_in``: whether people can sign in. All requests get the same bytes."""
    shown = PAGES[path]
    return render(
        f"console/{shown.name}.html",
        "pages/components.css",
        "console/console.css",
        "pages/components.js",
        "console/console.js",
        *shown.shared,
        f"console/{shown.name}.js",
        headers={"cache-control": "no-store"},
        area="console",
        start=START,
        pages=PAGES,
        path=path,
        page_title=shown.title,
        signs_in=signs_in,
    )
