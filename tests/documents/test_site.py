"""The site of docs/: built without a warning, every page in its navigation, every link with a target, nothing from other hosts."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.documents.blocks import DOCS, ROOT
from tests.documents.install import mkdocs
from tests.support.chromium import chromium
from tests.support.http_server import threaded
from tests.support.process import wait_for

LOADED = {"src", "srcset", "data", "poster", "action", "formaction", "background"}
"""Attributes whose addresses a browser requests by itself, or sends a form to."""
_ELSEWHERE = re.compile(r"^\s*(?:[a-z][a-z+.-]*:)?//|^\s*(?!data:)[a-z][a-z+.-]*:", re.IGNORECASE)
_STYLE_LOADS = re.compile(r"(?:@import\s+|url\()\s*[\"']?([^\"')\s]+)")


class Seen(HTMLParser):
    """The resources, links and anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.names: set[str] = set()
        self.items = 0
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.items += tag == "li"
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.names.add(value)
            elif name in LOADED or (name == "href" and tag == "link"):
                self.loads.append(value or "")
            elif name == "href" and tag == "a":
                self.leads.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    program = mkdocs()
    if program is None:
        pytest.skip("mkdocs is not installed (make docs)")
    folder = tmp_path_factory.mktemp("site")
    command = [str(program), "build", "--strict", "--site-dir", str(folder)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> dict[Path, Seen]:
    return {page: Seen(page) for page in site.rglob("*.html")}


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    leads = Seen(site / "index.html").leads
    for page in DOCS.rglob("*.md"):
        built = page.relative_to(DOCS).with_suffix(".html")
        assert (site / built).exists() and built.as_posix() in leads, f"{page.name} is not in the navigation of mkdocs.yml"


def test_the_source_of_the_site_is_no_part_of_it(site: Path) -> None:
    assert {file.suffix for file in site.rglob("*") if file.is_file()} & {".py", ".in", ".lock", ".md"} == set()


def test_every_link_leads_somewhere_in_the_site(site: Path) -> None:
    seen = pages(site)
    del seen[site / "404.html"]  # written for a server's root
    for page, one in seen.items():
        for link in one.leads:
            if _ELSEWHERE.match(link):
                continue
            address = urlsplit(link)
            target = Path(os.path.normpath(page.parent / unquote(address.path))) if address.path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page}: {link}"
            if address.fragment and target in seen:
                assert unquote(address.fragment) in seen[target].names, f"{page}: {link}"


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    loaded = [(page.name, link) for page, one in pages(site).items() for link in one.loads]
    styles = [(file.name, link) for file in site.rglob("*.css") for link in _STYLE_LOADS.findall(file.read_text())]
    assert len(loaded) > 100 and len(styles) > 10
    assert [each for each in loaded + styles if _ELSEWHERE.match(each[1])] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_lists_are_lists_in_the_site_as_well(site: Path, page: Path) -> None:
    """The forge and mkdocs disagree on lists that follow a paragraph at once, and on nested ones."""
    built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text()
    article = built[built.index("<article") : built.index("</article>")]
    prose = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert article.count("<li>") == len(re.findall(r"^ *(?:[-*]|\d+\.) ", prose, re.MULTILINE))


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder at an address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with threaded(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


FOUND = "document.querySelector('.md-search-result__item')?.innerText ?? ''"
SEARCH = """(() => {
  const field = document.querySelector('.md-search__input');
  field.focus(); field.value = 'prefix'; field.dispatchEvent(new Event('keyup', {bubbles: true}));
})()"""


def test_a_browser_contacts_no_other_host(site: Path, tmp_path: Path) -> None:
    """Pages with code, tables and pictures, and a search."""
    with served(site) as url, chromium(tmp_path) as browser:
        for page in ("configuration.html", "performance.html", "monitoring.html", "tree/CHANGELOG.html", "kubernetes.html"):
            browser.open(f"{url}/{page}")
            wait_for(lambda: browser.evaluate("document.readyState === 'complete' && document.querySelector('article h1') !== null"), 60)
        wait_for(lambda: browser.evaluate(f"{SEARCH}, {FOUND}"), 60, why=lambda: str(browser.complaints))
        assert browser.requests and all(each.startswith((url, "data:", "blob:")) for each in browser.requests), browser.requests
        assert browser.complaints == []
