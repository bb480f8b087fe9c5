"""The pages of the console: their names, titles, templates and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from starlette.responses import HTMLResponse

from gateway.pages.render import render

START = "/console"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the console. Its template and its script have its name.

    ``files``: other scripts, which run before its own, and its stylesheets, by their paths in ``gateway``.
    """

    title: str
    name: str
    files: tuple[str, ...]


_LIMITS = ("pages/usage.js", "console/limits.js", "console/limits.css")
_SETTINGS = ("console/settings.css",)


PAGES: Mapping[str, Page] = {
    START: Page("Overview", "overview", ("console/overview.css",)),
    f"{START}/models": Page("Models", "models", ("console/models.css",)),
    f"{START}/requests": Page("Requests", "requests", ("console/requests.css",)),
    f"{START}/keys": Page("Keys", "keys", _LIMITS),
    f"{START}/teams": Page("Teams", "teams", _LIMITS),
    f"{START}/people": Page("People", "people", _LIMITS),
    f"{START}/usage": Page("Usage", "usage", _LIMITS),
    f"{START}/audit": Page("Audit log", "audit", ("console/audit.css",)),
    f"{START}/configuration": Page("Configuration", "configuration", _SETTINGS),
    f"{START}/system": Page("System", "system", _SETTINGS),
}
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
        *shown.files,
        f"console/{shown.name}.js",
        headers={"cache-control": "no-store"},
        area="console",
        start=START,
        pages=PAGES,
        path=path,
        page_title=shown.title,
        signs_in=signs_in,
    )
