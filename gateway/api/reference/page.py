"""Render an OpenAPI document as an HTML page without scripts and without files from elsewhere.

The rule: ``descriptions`` decides the text for a schema; the template decides its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import HTMLResponse

from gateway.api.reference import descriptions
from gateway.pages.render import render


def page(document: Mapping[str, Any]) -> HTMLResponse:
    """Return the whole page."""
    return render("api/reference/page.html", "api/reference/page.css", document=document, descriptions=descriptions)
