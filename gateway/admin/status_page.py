"""The status page: one HTML document that updates itself, and the page that explains how to see the status.

They load nothing from other hosts, and a model ID or a log line is always shown as text.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import HTMLResponse

from gateway.admin.status_view import StatusView
from gateway.pages.render import render

_STYLE, _SCRIPT = "admin/status.css", "admin/status.js"


def page(shown: StatusView, headers: Mapping[str, str]) -> HTMLResponse:
    """Return the page with these headers in addition to its own."""
    return render("admin/status.html", _STYLE, _SCRIPT, headers=headers, shown=shown)


def token_page(headers: Mapping[str, str]) -> HTMLResponse:
    """Return the page for a browser without the required token: it explains how to see the status."""
    return render("admin/token.html", _STYLE, _SCRIPT, status=401, headers=headers)
