"""Write HTML safely: function calls create elements, and every text is escaped.

The rule: only ``tag`` creates ``Html``, and only ``Html`` is inserted unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

_VOID = {"link", "meta"}


class Html(str):
    """Markup, as opposed to text."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | bool | None) -> Html:
    """Return an element. Children that are not ``Html`` are text; an attribute that is None or False is omitted.

    ``class_`` is the attribute class, and other underscores are dashes.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value not in (None, False)}
    parts = [name, *(_attribute(key, value) for key, value in given.items())]
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{' '.join(parts)}>" if name in _VOID else f"<{' '.join(parts)}>{inner}</{name}>")


def _attribute(name: str, value: str | bool | None) -> str:
    return name if value is True else f'{name}="{escape(str(value))}"'


def page_policy(style: str, script: str | None = None) -> dict[str, str]:
    """Return the headers of a page that may apply this style, run this script, and nothing else (CSP Level 3)."""
    scripts = f"script-src {_hash(script)}; connect-src 'self'; " if script is not None else ""
    return {
        "content-security-policy": (
            f"default-src 'none'; style-src {_hash(style)}; {scripts}img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
