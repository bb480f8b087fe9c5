"""The documents of this version in the console: all of them, their links and pictures, without a token and without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from posixpath import normpath

import httpx2
import pytest

from gateway.console import documents
from tests.support.accessibility import audit
from tests.support.console import Console, check_quiet, console
from tests.support.process import configuration, launched

TAGS = frozenset(
    [
        "a",
        "blockquote",
        "br",
        "code",
        "div",
        "em",
        "h1",
        "h2",
        "h3",
        "h4",
        "hr",
        "img",
        "li",
        "ol",
        "p",
        "pre",
        "strong",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "tr",
        "ul",
    ]
)
PAGE = documents.PREFIX + "{}"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory, configuration(launched())) as one:
        yield one


def text(name: str) -> str:
    made = documents.page(name, signs_in=False)
    assert made is not None, name
    return bytes(made.body).decode()


def article(name: str) -> str:
    return text(name).partition("<article>")[2].partition("</article>")[0]


def test_every_link_between_documents_leads_to_a_document_and_a_heading() -> None:
    reached, links = {documents.FIRST}, 0
    for name in documents.names():
        for link in re.findall(r'<a href="([^"]+)"', article(name)):
            if link.startswith("https://"):
                continue
            path, _, anchor = unescape(link).partition("#")
            target = normpath(f"{name}/../{path}") if path else name
            assert target in documents.names(), (name, link)
            assert not anchor or f'id="{anchor}"' in article(target), (name, link)
            reached.add(target)
            links += 1
    assert links > 300
    assert {"console.md", "operators/troubleshooting.md", "developers/index.md", "errors.md"} <= reached


def test_a_page_has_no_markup_but_the_one_of_the_renderer() -> None:
    for name in documents.names():
        found = set(re.findall(r"<(/?\w+|!)", article(name)))
        assert {each.removeprefix("/") for each in found} <= TAGS, name
        assert "<!-- not run" not in text(name) and "&lt;!--" not in re.sub(r"<code.*?</code>", "", article(name), flags=re.DOTALL)


def test_documents_need_no_token_and_nothing_else_is_read(seen: Console) -> None:
    assert "Find why a request failed" in httpx2.get(seen.url + PAGE.format("console.md"), timeout=60).text
    for name in ("nothing.md", "../console", "%2e%2e/pyproject.toml", "draw.py", "/etc/passwd", "operators"):
        response = httpx2.get(seen.url + PAGE.format(name), timeout=60, follow_redirects=False)
        assert response.status_code in (401, 404) or "Overview" in response.text, name


def test_the_system_page_leads_to_a_list_by_task_and_from_there_to_a_section(seen: Console) -> None:
    seen.open("/console/system")
    seen.click("#about a")
    seen.wait("document.title === 'Documents · vllm-gateway'")
    audit(seen.browser)
    seen.click("article a[href='security.md']")
    seen.wait("document.querySelector('article h1').textContent === 'Security'")
    assert seen.browser.evaluate("[...document.querySelectorAll('pre')].every((each) => each.parentNode.querySelector('.copy'))")
    seen.click("article a[href^='#']")
    seen.wait("location.hash && document.querySelector(':target')")
    audit(seen.browser)
    seen.fits()
    check_quiet(seen)


def test_pictures_are_in_the_page(seen: Console) -> None:
    seen.browser.open(seen.url + PAGE.format("portal.md"))
    seen.wait("document.querySelector('article img')?.naturalWidth > 600")
    check_quiet(seen)
