"""The pages of the console: their paths, titles, scripts and stylesheets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from starlette.responses import HTMLResponse

from gateway.pages.shell import Page, shell

START = "/console"

_LIMITS = ("pages/usage.js", "console/limits.js", "console/limits.css")
_SETTINGS = ("console/settings.css",)

PAGES: Mapping[str, Page] = {
    START: Page("Overview", "overview", ("console/overview.css",)),
    f"{START}/models": Page("Models", "models", ("console/models.css",)),
    f"{START}/queue": Page("Queue", "queue", (*_LIMITS, "console/queue.css")),
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
    """Return the page of a path of ``PAGES``. ``signs_in``: whether people can sign in."""
    return shell("console", PAGES, path, signs_in=signs_in)
