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

from gateway.console import pages as console
from gateway.pages.render import render
from gateway.sign_in import pages

GATEWAY = Path(__file__).parents[3] / "gateway"


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


def text(page: HTMLResponse) -> str:
    return bytes(page.body).decode()


def confirm(name: str, token: str) -> Elements:
    """Return the page that confirms a sign-in link: a text with the name, and an attribute with the token."""
    return Elements(text(pages.confirm_link(name, token)))


PLAIN = confirm("m", "t").tags


@given(st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"])))
def test_text_and_attributes_cannot_escape_into_markup(value: str) -> None:
    found = confirm(value, value)
    assert found.tags == PLAIN
    assert found.attributes["value"] == value
    assert value in found.text


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        render("sign_in/page.html", "sign_in/page.css")


def test_templates_have_no_other_style_or_script_and_disable_no_escaping() -> None:
    forbidden = re.compile(r"<style>(?!{{ style }})|<script>(?!{{ script }})|\bstyle=|\bon\w+=|\|\s*safe|autoescape")
    templates = {path: path.read_text() for path in GATEWAY.glob("**/*.html")}
    assert templates
    assert [path for path, template in templates.items() if forbidden.search(template)] == []


def test_a_page_may_use_only_its_own_style_and_script() -> None:
    page = console.page(console.START, signs_in=False)
    (style,) = re.findall("<style>(.*?)</style>", text(page), re.DOTALL)
    (script,) = re.findall("<script>(.*?)</script>", text(page), re.DOTALL)
    style_hash, script_hash = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script))
    assert page.headers["content-security-policy"] == (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    refused = pages.failed("no", 403)
    assert (refused.status_code, refused.headers["cache-control"], "<script>" in text(refused)) == (403, "no-store", False)
