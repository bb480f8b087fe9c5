"""Find words and phrases of the vocabulary in files. Pure functions: text in, findings out.

Python is read twice: identifiers come from the syntax tree, where only definitions count, because a use follows its definition;
docstrings, comments and messages come from a small lexer, which keeps their positions in the source. Calls of the program with many
positional arguments are found, too: their order cannot be read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.style.vocabulary import DOCSTRING_OPENINGS, IN_SENTENCES, NAMES, OPENINGS, PHRASES, WHOLE_NAMES, Phrase


class Finding(NamedTuple):
    """A word or phrase at a line (from 1). ``kind`` is ``name``, ``heading``, ``phrase``, ``docstring`` or ``call``.

    ``within`` is the whole name.
    """

    path: str
    line: int
    kind: str
    found: str
    within: str
    replacement: str

    def __str__(self) -> str:
        within = f" in `{self.within}`" if self.within not in ("", self.found) else ""
        return f"{self.path}:{self.line}: {self.kind} `{self.found}`{within}: instead: {self.replacement}"


def _flat(table: dict[str, str]) -> dict[str, str]:
    return {each: replacement for spelled, replacement in table.items() for each in spelled.split()}


_BY_WORD = _flat(NAMES)
_BY_NAME = _flat(WHOLE_NAMES)
_IN_SENTENCES = frozenset(IN_SENTENCES.split())
_NOT_VERBS = frozenset(DOCSTRING_OPENINGS.split())
_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_HEADING_WORDS = re.compile(r"[A-Za-z]+")


def _combined(phrases: Iterable[Phrase]) -> str:
    """Join patterns, each as a group ``pN``; white space may contain line breaks, comment signs and list signs."""
    return "|".join(f"(?P<p{n}>{phrase.pattern.replace(' ', _SPACE)})" for n, phrase in enumerate(phrases))


_SPACE = r"(?:\s(?:\s|\#|>)*)"
_ANYWHERE = re.compile(rf"(?<![\w-])(?i:{_combined(PHRASES)})(?![\w-])")
_SENTENCE = r"(?:\A[^\w`]*|[.!?:;][\"')`*]*\s[\s#>]*|\n[\s#>]*\n[\s#>]*(?:[-*|]\s+)?|\|\s+|\n\s*(?:[-*]|\d+\.)\s+|\(|\*\*)"
_OPENING = re.compile(rf"{_SENTENCE}(?:{_combined(OPENINGS)})")
_PYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<prefix>\b[rRbBuUfF]{1,2})?(?:(?P<long>\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3})|(?P<short>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))""",
    re.VERBOSE | re.DOTALL,
)
MAX_POSITIONAL = 8
"""Positional arguments that a call may have."""
_MESSAGE = re.compile(r"\S \S+ \S")
"""What a string needs to be read as prose: three words."""


def in_prose(path: str, text: str, line: int) -> Iterator[Finding]:
    """Find phrases in a piece of prose whose first line has the number ``line``."""
    for pattern, phrases in ((_ANYWHERE, PHRASES), (_OPENING, OPENINGS)):
        for match in pattern.finditer(text):
            number = int((match.lastgroup or "p0")[1:])
            found = " ".join(match[match.lastgroup or 0].replace("#", " ").split())
            yield Finding(path, line + text.count("\n", 0, match.start(f"p{number}")), "phrase", found, "", phrases[number].replacement)


def in_name(path: str, name: str, line: int, *, kind: str = "name") -> Iterator[Finding]:
    """Find words in an identifier; the name of a test is read as a sentence, too."""
    bare = name.strip("_")
    if whole := _BY_NAME.get(bare):
        yield Finding(path, line, kind, bare, name, whole)
        return
    sentence = bare.startswith("test_") and kind == "name"
    for word in _NAME_WORDS.findall(name):
        if sentence and word in _IN_SENTENCES:
            continue
        if replacement := _BY_WORD.get(word.lower()):
            yield Finding(path, line, kind, word, name, replacement)
    if sentence:
        words = {word for word in _NAME_WORDS.findall(name) if word in _BY_WORD}
        for finding in in_prose(path, bare.removeprefix("test_").replace("_", " "), line):
            if not words & set(finding.found.split()):
                yield finding._replace(within=name)


def in_heading(path: str, heading: str, line: int) -> Iterator[Finding]:
    """Find words in a document's heading."""
    for word in _HEADING_WORDS.findall(re.sub(r"`[^`]*`", "", heading)):
        if replacement := _BY_WORD.get(word.lower()):
            yield Finding(path, line, "heading", word, heading, replacement)


def in_path(path: str) -> Iterator[Finding]:
    """Find words in the name of a module or a document."""
    yield from in_name(path, PurePosixPath(path).stem, 1)


def _defined(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every identifier that a module defines, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno


def in_calls(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Find calls with too many positional arguments, by the name of the function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
            name = ast.unparse(node.func).rpartition(".")[2]
            yield Finding(path, node.lineno, "call", name, "", f"at most {MAX_POSITIONAL} arguments by position, the others by name")


def _documentation(tree: ast.AST) -> Iterator[tuple[int, ast.AST | None]]:
    """Yield the first line of every docstring, with its function if it has one."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for index, each in enumerate(body):
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
                function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and index == 0
                yield each.lineno, node if function else None


def _is_property(function: ast.AST) -> bool:
    decorators = getattr(function, "decorator_list", [])
    return any("property" in ast.unparse(each) or ast.unparse(each).endswith(".setter") for each in decorators)


def in_python(path: str, text: str) -> Iterator[Finding]:
    """Find words in definitions, and phrases in docstrings, comments and messages."""
    tree = ast.parse(text)
    for name, line in _defined(tree):
        yield from in_name(path, name, line)
    documentation = dict(_documentation(tree))
    of_program = path.startswith(("gateway/", "upstream/"))
    if of_program:
        yield from in_calls(path, tree)
    starts, comments = [0, *(match.end() for match in re.finditer("\n", text))], Prose()
    line = 1
    for match in _PYTHON.finditer(text):
        while line < len(starts) and starts[line] <= match.start():
            line += 1
        if match["comment"] is not None:
            if not match["comment"].startswith(("# noqa", "# type:", "# fmt:")):
                own = not text[starts[line - 1] : match.start()].strip()
                yield from comments.add(path, text, match.start(), match.end(), line, own)
            continue
        prefix = (match["prefix"] or "").lower()
        if line in documentation and "b" not in prefix:
            yield from in_prose(path, match[0], line)
            function = documentation[line]
            if function is not None and of_program and not _is_property(function):
                yield from _not_a_verb(path, match[0], line)
        elif "b" not in prefix and "r" not in prefix and not path.startswith("tests/") and _MESSAGE.search(match[0]):
            yield from in_prose(path, match[0], line)
    yield from comments.rest(path, text)


def _not_a_verb(path: str, docstring: str, line: int) -> Iterator[Finding]:
    first = _HEADING_WORDS.search(docstring.lstrip("rR\"'"))
    if first and first[0].lower() in _NOT_VERBS:
        yield Finding(path, line, "docstring", first[0], "", "a verb: Return …, Check …, Yield …")


class Prose:
    """Comments of consecutive lines, read as one text."""

    def __init__(self) -> None:
        self._start = self._end = self._line = self._last = 0

    def add(self, path: str, text: str, start: int, end: int, line: int, alone: bool) -> Iterator[Finding]:
        """Add a comment; ``alone`` is a comment without code on its line. Yield the findings of the text that it does not continue."""
        if not (alone and self._end and self._last == line - 1):
            yield from self.rest(path, text)
            self._start, self._line = start, line
        self._end, self._last = end, line if alone else 0

    def rest(self, path: str, text: str) -> Iterator[Finding]:
        """Yield the findings of the last text."""
        if self._end:
            yield from in_prose(path, text[self._start : self._end], self._line)


_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`|\]\([^)\s]+\)|<!--|-->|https?://\S+", re.MULTILINE | re.DOTALL)


def _blanked(match: re.Match[str]) -> str:
    """Code becomes ``x``, so that a sentence keeps its shape; of a block only the comments stay."""
    if "\n" not in match[0]:
        return "`" + "x" * (len(match[0]) - 2) + "`"
    return "\n".join(line if line.lstrip().startswith("# ") else "" for line in match[0].split("\n"))


def in_markdown(path: str, text: str) -> Iterator[Finding]:
    """Find words in headings, and phrases in prose and in the comments of blocks of code."""
    prose = _NOT_PROSE.sub(_blanked, text)
    for match in re.finditer(r"^#{1,6} (.+)$", _FENCE.sub(lambda each: "\n" * each[0].count("\n"), text), re.MULTILINE):
        yield from in_heading(path, match[1], text.count("\n", 0, match.start()) + 1)
    yield from in_prose(path, prose, 1)


def in_text(path: str, text: str) -> Iterator[Finding]:
    """Find phrases anywhere in a file of another kind."""
    yield from in_prose(path, re.sub(r"`[^`\n]+`", _blanked, text), 1)


def findings(path: str, text: str) -> list[Finding]:
    """Find everything in one file, in the order of its lines."""
    read = in_python if path.endswith(".py") else in_markdown if path.endswith(".md") else in_text
    return sorted({*in_path(path), *read(path, text)}, key=lambda each: (each.line, each.found))
