"""The pages of an area, such as the console: a shell with the navigation, and in it the page's own template and script.

The rule: a page contains no data, so all requests get the same bytes, and a page needs no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import HTMLResponse

from gateway.pages.render import render


@dataclass(frozen=True, slots=True)
class Page:
    """A page of an area. Its template and its script have its name.

    ``files``: other scripts, which run before its own, and its stylesheets, by their paths in ``gateway``.
    """

    title: str
    name: str
    files: tuple[str, ...] = ()


def shell(area: str, pages: Mapping[str, Page], path: str, *, signs_in: bool, page: Page | None = None, **values: Any) -> HTMLResponse:
    """Return the page of a path. ``pages`` are those of the area by path, in the order of the navigation; the first one is its start.

    Templates, styles and scripts of the area are in the package of its name. ``signs_in``: whether people can sign in. ``page`` is a page
    that the navigation does not list, with the ``values`` of its template.
    """
    shown = page or pages[path]
    return render(
        f"{area}/{shown.name}.html",
        "pages/components.css",
        f"{area}/{area}.css",
        "pages/components.js",
        f"{area}/{area}.js",
        *shown.files,
        f"{area}/{shown.name}.js",
        headers={"cache-control": "no-store"},
        area=area,
        start=next(iter(pages)),
        pages=pages,
        path=path,
        page_title=shown.title,
        signs_in=signs_in,
        **values,
    )
