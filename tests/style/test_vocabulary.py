"""The vocabulary check finds what it should, and lets ordinary sentences pass."""

from __future__ import annotations

import pytest

from tests.style.__main__ import allowed, by_folder
from tests.style.scanning import Finding, findings


def found(path: str, text: str) -> list[tuple[int, str]]:
    return [(each.line, each.found) for each in findings(path, text)]


@pytest.mark.parametrize(
    "text",
    [
        "def ask(): ...",
        "class WholeAnswer: ...",
        "def f(told): ...",
        "self.kept = 1",
        "for place in (): ...",
        "import json as words",
        "def test_the_answer_is_whole(): ...",
        "def test_a_key_of_its_own(): ...",
        '"""Whoever waits is served."""',
        "# Who waits is served.",
        "# He waits.",
        "x = 1  # nobody reads it",
        "error('the request is over, and goes on')",
        "def f():\n    '''Whether it is so.'''",
    ],
)
def test_the_dialect_is_found_in_python(text: str) -> None:
    assert found("gateway/x.py", text)


@pytest.mark.parametrize(
    "text",
    [
        "answer()",
        "x.head, tell(told=1)",
        '"""Return the answer that a client asked the server to look at, kept in its place, by turns told."""'.replace(
            ", by turns told", ""
        ),
        "def test_a_key_looks_like_a_place(): ...",
        "# Use a term such as this one, which is over 80% long.",
        "def f():\n    '''Return whether it is so.'''",
        "class C:\n    @property\n    def f(self):\n        '''Whether it is so.'''",
        "x = b'nobody reads it'",
        "x = 'nobody'",
    ],
)
def test_ordinary_python_passes(text: str) -> None:
    assert found("gateway/x.py", text) == []


@pytest.mark.parametrize(
    ("path", "call", "expected"),
    [
        ("gateway/x.py", "a.f(1, 2, 3, 4, 5, 6, 7, 8, 9)", [(1, "f")]),
        ("upstream/x.py", "Record(1, 2, 3, 4, 5, 6, 7, 8, *more)", [(1, "Record")]),
        ("gateway/x.py", "f(1, 2, 3, 4, 5, 6, 7, 8, ninth=9)", []),
        ("tests/x.py", "f(1, 2, 3, 4, 5, 6, 7, 8, 9)", []),
    ],
)
def test_a_call_has_at_most_eight_positional_arguments(path: str, call: str, expected: list[tuple[int, str]]) -> None:
    assert found(path, call) == expected


def test_a_docstring_of_several_lines_has_the_phrase_at_its_line() -> None:
    text = '"""Serve requests.\n\nA client disconnects, and\nnobody\nwaits."""\n\n# It is\n# told of it. It goes\n# on.\nx = 1\n'
    assert found("gateway/x.py", text) == [(4, "nobody"), (7, "is told"), (8, "goes on")]


def test_documents_are_read_without_their_code() -> None:
    text = "# Kept answers\n\nIt is `told of` it.\n\n```sh\nnobody\n# nobody\n```\n\nIt tells\nof it. What is it? What is so is said.\n"
    assert found("docs/x.md", text) == [(1, "Kept"), (1, "answers"), (7, "nobody"), (10, "tells of"), (11, "What")]


def test_other_files_are_prose() -> None:
    assert found("deploy/x.yaml", "a: 1  # made anew\n# by whoever\n# comes\n") == [(1, "anew"), (2, "whoever")]


def test_the_name_of_a_file_is_checked() -> None:
    assert found("gateway/books.py", "") == [(1, "books")]


def test_a_finding_names_the_replacement() -> None:
    (finding,) = findings("gateway/x.py", "\nanswer_size = 1")
    assert str(finding) == "gateway/x.py:2: name `answer` in `answer_size`: instead: response, reply"


def test_what_is_allowed_has_a_reason() -> None:
    assert all(len(row.reason) > 10 for row in allowed())
    row = next(row for row in allowed() if row.what == "HEAD")
    assert row.covers(Finding("gateway/x.py", 1, "name", "head", "HEAD", ""))
    assert not row.covers(Finding("gateway/x.py", 1, "name", "answer", "ANSWER", ""))


def test_the_summary_is_by_folder() -> None:
    assert by_folder({"a/b.py": 2, "a/c.py": 1, "d.md": 1}) == {"a": 3, ".": 1}
