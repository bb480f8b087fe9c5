"""Two hundred wrong configurations from the table of settings: each is refused, with its line and what to write."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

from gateway.config import load
from gateway.config.problems import ConfigurationError, Problem
from tests.gateway.config.mistakes import DOCUMENT, Mistake, mistakes
from tests.support.certificates import certificate

SEED, COUNT = 1, 200
UNEXPLAINED = 2
"""Mistakes that may have a message without a remedy. None may be accepted."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certificate(tmp_path)
    (tmp_path / "keys.yaml").write_text("[]\n")
    return tmp_path


def problems(folder: Path, text: str) -> list[Problem]:
    """Return all problems of a configuration."""
    file = folder / "gateway.yaml"
    file.write_text(text)
    try:
        load(file, {"TOKEN": "secret-of-the-environment"})
    except ConfigurationError as error:
        return list(error.problems)
    return []


def test_the_document_is_valid(folder: Path) -> None:
    assert [str(each) for each in problems(folder, yaml.safe_dump(dict(DOCUMENT), sort_keys=False))] == []


def test_each_mistake_is_refused_with_its_line_and_a_remedy(folder: Path) -> None:
    accepted: list[str] = []
    unexplained: list[str] = []
    made = mistakes(SEED, COUNT)
    assert len(made) == COUNT and min(Counter(each.kind for each in made).values()) > 10
    for each in made:
        reported = problems(folder, each.text)
        if not reported:
            accepted.append(f"{each.kind}: {each.setting}")
        elif not is_explained(each, reported):
            unexplained.append(f"{each.kind}: {each.setting}, line {each.line}, one of {each.remedies}: {list(map(str, reported))}")
    assert accepted == []
    assert len(unexplained) <= UNEXPLAINED, "\n\n".join(unexplained)


def is_explained(mistake: Mistake, reported: list[Problem]) -> bool:
    """Return whether every problem is at the line of the mistake, and one has the remedy."""
    return {problem.line for problem in reported} == {mistake.line} and any(mistake.is_explained_by(each.message) for each in reported)
