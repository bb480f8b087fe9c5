"""Add link targets outside docs/ to the site: sources as pages of code, folders as lists, other pages unchanged.

A hook of mkdocs, named in mkdocs.yml. The rule: pages are written for the repository, where a relative link leads into the tree;
nothing is written twice. A broken link stays unchanged, so that mkdocs rejects it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BELOW = "tree/"
"""The folder of the site for files outside docs/."""
_LISTING = "-files.md"
_PUBLISHED = {".md", ".png", ".svg", ".json"}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".mjs": "js", "": "text"}
_FENCED = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all link targets of the pages, and their link targets."""
    waiting = [ROOT / "CHANGELOG.md", *(DOCS / file.src_uri for file in files.documentation_pages())]
    added: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if not in_docs(page) and page not in added:
            added.add(page)
            files.append(File.generated(config, site_path(page), content=markdown(page)))
        waiting += [target for target in targets(page) if not in_docs(target) and target not in added]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links to their targets in the site."""
    source = origin(page.file.src_uri)

    def relative(match: re.Match[str]) -> str:
        target = pointed(source, match[1])
        return os.path.relpath(site_path(target), os.path.dirname(page.file.src_uri)) if target.exists() else match[1]

    return "".join(text if fenced else _LINK.sub(relative, text) for text, fenced in pieces(markdown))


def targets(page: Path) -> Iterator[Path]:
    """Yield the files and folders that a page links to; code has no links."""
    if page.suffix == ".md" or page.is_dir():
        for text, fenced in pieces(markdown(page)):
            if not fenced:
                yield from (target for match in _LINK.finditer(text) if (target := pointed(page, match[1])).exists())


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Split a page into fenced and other parts."""
    end = 0
    for match in _FENCED.finditer(text):
        yield text[end : match.start()], False
        yield match[0], True
        end = match.end()
    yield text[end:], False


def pointed(page: Path, link: str) -> Path:
    """Return the target of a relative link of a page, or of a folder's list."""
    return Path(os.path.normpath((page if page.is_dir() else page.parent) / link))


def in_docs(path: Path) -> bool:
    """Return whether mkdocs publishes the file itself."""
    return path.is_relative_to(DOCS) and path.suffix in _PUBLISHED


def site_path(path: Path) -> str:
    """Return the path of a file or folder in the site's sources."""
    if in_docs(path):
        return path.relative_to(DOCS).as_posix()
    inside = BELOW + path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{inside}/{_LISTING}"
    return inside if path.suffix == ".md" else inside + ".md"


def origin(path: str) -> Path:
    """Return the file or folder at a path of the site's sources."""
    if not path.startswith(BELOW):
        return DOCS / path
    inside = ROOT / path.removeprefix(BELOW)
    return inside.parent if inside.name == _LISTING else inside


def markdown(path: Path) -> str:
    """Return a file or folder as a page."""
    if path.suffix == ".md":
        return path.read_text()
    title = path.relative_to(ROOT).as_posix()
    return f"---\ntitle: {title}\nsearch: {{exclude: true}}\n---\n\n# `{title}`\n\n{listing(path) if path.is_dir() else code(path)}\n"


def listing(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith((".", "__")))
    return "\n".join(f"- [{name}]({name})" for name in names)


def code(file: Path) -> str:
    text = file.read_text()
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}"
