"""Render a template as the response with a page.

The rule: every text in a template is escaped, and a missing value is an error. A page's content security policy permits only its own style
and script, by their hashes, so markup that came in as text could neither load nor run anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse


def render(
    template: str, *files: str, status: int = 200, headers: Mapping[str, str] | None = None, has_forms: bool = False, **values: object
) -> HTMLResponse:
    """Return the response with a page. ``files`` are its stylesheets (.css) and scripts, by their paths in ``gateway``, as ``template`` is.

    ``values`` are the template's variables. Its headers are the page's policy and ``headers``. The page may apply its styles and the one of
    all pages, and run its scripts. With ``has_forms`` it may send forms to this origin.
    """
    styles = "".join(map(_text, ("pages/base.css", *(file for file in files if file.endswith(".css")))))
    run = "".join(_text(file) for file in files if not file.endswith(".css"))
    page = _environment().get_template(template).render(values, style=Markup(styles), script=Markup(run))  # noqa: S704  own files
    return HTMLResponse(page, status, _policy(styles, run, has_forms=has_forms) | dict(headers or {}))


@cache
def _environment() -> Environment:
    loader = PackageLoader("gateway", "")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, auto_reload=False, trim_blocks=True, lstrip_blocks=True)


@cache
def _text(name: str) -> str:
    return (resources.files("gateway") / name).read_text(encoding="utf-8")


def _policy(style: str, script: str, *, has_forms: bool) -> dict[str, str]:
    """Return the headers of a page that may apply this style, run this script, and perhaps send forms, and nothing else (CSP Level 3).

    Without a referrer a form's ``Origin`` would be null (Fetch Standard, "append a request Origin header").
    """
    scripts = f"script-src {_hash(script)}; connect-src 'self'; " if script else ""
    return {
        "content-security-policy": f"default-src 'none'; style-src {_hash(style)}; {scripts}img-src data:; "
        f"base-uri 'none'; form-action '{'self' if has_forms else 'none'}'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin" if has_forms else "no-referrer",
    }


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
