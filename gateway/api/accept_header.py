"""Decide by the Accept header which kind of response a client prefers (RFC 9110, section 12.5.1)."""

from __future__ import annotations

import re

_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)")


def prefers_html(accept: str) -> bool:
    """Check whether an Accept header names HTML, as browsers do, and does not prefer JSON."""
    weights = dict(map(_weighted, accept.split(",")))
    html = weights.get("text/html", 0.0)
    return html > 0 and html >= weights.get("application/json", 0.0)


def _weighted(part: str) -> tuple[str, float]:
    kind, *parameters = (parameter.strip().lower() for parameter in part.split(";"))
    quality = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
    return kind, float(quality) if _QUALITY.fullmatch(quality) else 0.0
