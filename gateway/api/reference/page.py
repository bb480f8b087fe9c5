"""Render an OpenAPI document as an HTML page without scripts and without files from elsewhere.

The rule: ``descriptions`` decides the text for a schema; this module decides its layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from gateway.api.html import Html, page_policy, tag
from gateway.api.reference import descriptions
from gateway.api.reference.descriptions import Operation, Ref, TableRow

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .2rem; }
h3 { font: 600 1rem ui-monospace, Menlo, Consolas, monospace; margin: 1.6rem 0 .2rem; }
code, pre { font: .9em ui-monospace, Menlo, Consolas, monospace; } pre { overflow: auto; }
p { margin: .3rem 0; } dl { display: grid; grid-template-columns: 3rem 1fr; margin: .3rem 0; } dd { margin: 0; } .quiet { opacity: .7; }
table { border-collapse: collapse; margin: .4rem 0; } td { vertical-align: top; padding: .15rem .8rem .15rem 0; overflow-wrap: break-word; }
td:first-child { white-space: nowrap; }
"""
HEADERS = page_policy(_STYLE)


def page(document: Mapping[str, Any]) -> str:
    """Render the whole page."""
    info, schemas = document["info"], document["components"].get("schemas", {})
    head = tag("head", tag("meta", charset="utf-8"), tag("title", info["title"]), tag("style", Html(_STYLE)))
    about = (tag("p", *_prose(part)) for part in info.get("description", "").split("\n\n") if part)
    sections = [part for name, group in groupby(descriptions.operations(document), _tag) for part in _section(name, group, document)]
    shapes = [tag("h2", "Shapes"), *(_shape(name, schema) for name, schema in schemas.items())] if schemas else []
    body = tag("body", tag("h1", f"{info['title']} {info['version']}"), *about, *sections, *shapes)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}"


def _tag(operation: Operation) -> str:
    return next(iter(operation.document.get("tags", ())), "")


def _section(name: str, group: Iterable[Operation], document: Mapping[str, Any]) -> list[Html]:
    return [*([tag("h2", name)] if name else []), *(_operation(each, document) for each in group)]


def _operation(operation: Operation, document: Mapping[str, Any]) -> Html:
    texts = operation.document
    responses = [
        part for status, meaning in descriptions.responses(document, operation) for part in (tag("dt", status), tag("dd", *_prose(meaning)))
    ]
    return tag(
        "section",
        tag("h3", f"{operation.method} {operation.path}"),
        *(tag("p", *_prose(texts[name])) for name in ("summary", "description") if name in texts),
        *([tag("p", "Request: ", *_kinds(operation.request_kinds), class_="quiet")] if operation.request_kinds else []),
        tag("p", "Response: ", *_kinds(operation.response_kinds), class_="quiet"),
        *([tag("pre", call)] if (call := descriptions.curl(operation)) else []),
        _table(operation.parameters),
        tag("dl", *responses),
    )


def _kinds(kinds: Mapping[str, tuple[str, ...]]) -> Iterable[str]:
    for index, (kind, pieces) in enumerate(kinds.items()):
        yield ", " if index else ""
        yield kind
        if any(isinstance(piece, Ref) for piece in pieces):
            yield ": "
            yield from _pieces(pieces)


def _shape(name: str, schema: Mapping[str, Any]) -> Html:
    about = [tag("p", *_prose(schema["description"]))] if "description" in schema else []
    plain = [] if "properties" in schema else [tag("p", *_pieces(descriptions.kind_of(schema)))]
    return tag("section", tag("h3", name, id=name), *about, *plain, _table(descriptions.rows(schema)))


def _table(rows: Iterable[TableRow]) -> Html:
    lines = [tag("tr", tag("td", tag("code", row.name)), tag("td", *_pieces(row.kind)), tag("td", *_about(row))) for row in rows]
    return tag("table", *lines) if lines else Html()


def _about(row: TableRow) -> list[str]:
    needed = [tag("b", "required"), "; " if row.about else ""] if row.required else []
    return [*needed, *_prose(row.about)]


def _pieces(pieces: Iterable[str]) -> Iterable[str]:
    for piece in pieces:
        yield from [tag("a", piece, href=f"#{piece}")] if isinstance(piece, Ref) else _prose(piece)


def _prose(text: str) -> list[str]:
    """Return text with the parts between backticks as code."""
    return [tag("code", part) if index % 2 else part for index, part in enumerate(text.split("`"))]
