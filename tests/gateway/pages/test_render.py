"""Templates: text never becomes markup, a missing value is an error, and a page may use only its own style and script."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from starlette.responses import HTMLResponse

from gateway.admin.status_view import ModelRow, StatusView
from gateway.pages.render import render

GATEWAY = Path(__file__).parents[3] / "gateway"
STATUS = ("admin/status.html", "admin/status.css", "admin/status.js")


class Elements(HTMLParser):
    """The start tags of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def status(model: str) -> HTMLResponse:
    """Return the status page of one model."""
    row = ModelRow(model, (), "ready", "", 0, 0, "", "-", (), ())
    return render(*STATUS, shown=StatusView("ready", "ready", (), (), (row,)))


def text(page: HTMLResponse) -> str:
    return bytes(page.body).decode()


PLAIN = Elements(text(status("m"))).tags


@given(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])))
def test_text_and_attributes_cannot_escape_into_markup(value: str) -> None:
    found = Elements(text(status(value)))
    assert found.tags == PLAIN
    assert found.attributes["data-part"] == value
    assert value in found.text


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'shown' is undefined"):
        render(*STATUS)


def test_templates_have_no_other_style_or_script_and_disable_no_escaping() -> None:
    forbidden = re.compile(r"<style>(?!{{ style }})|<script>(?!{{ script }})|\bstyle=|\bon\w+=|\|\s*safe|autoescape")
    templates = {path: path.read_text() for path in GATEWAY.glob("**/*.html")}
    assert templates
    assert [path for path, template in templates.items() if forbidden.search(template)] == []


def test_a_page_may_use_only_its_own_style_and_script() -> None:
    page = status("m")
    (style,) = re.findall("<style>(.*?)</style>", text(page), re.DOTALL)
    (script,) = re.findall("<script>(.*?)</script>", text(page), re.DOTALL)
    style_hash, script_hash = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script))
    assert page.headers["content-security-policy"] == (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    token = render("admin/token.html", *STATUS[1:], status=401, headers={"vary": "accept"})
    assert (token.status_code, token.headers["vary"], "<script>" in text(token)) == (401, "accept", False)
