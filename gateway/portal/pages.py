"""The pages of the portal: their paths, titles and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from starlette.responses import HTMLResponse

from gateway.pages.shell import Page, shell

START = "/portal"

PAGES: Mapping[str, Page] = {
    START: Page("Models", "models"),
    "/portal/playground": Page("Playground", "playground", ("portal/markdown.js",)),
    "/portal/usage": Page("Usage", "usage", ("pages/usage.js",)),
    "/portal/keys": Page("Keys", "keys"),
    "/portal/connect": Page("Connect", "connect"),
}
"""The pages by path, in the order of the navigation."""


@cache
def page(path: str, *, signs_in: bool) -> HTMLResponse:
    """Return the page of a path of ``PAGES``. ``signs_in``: whether people can sign in."""
    return shell("portal", PAGES, path, signs_in=signs_in)
