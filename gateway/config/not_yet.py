"""The settings that are read and checked but do nothing yet: the one place that knows them.

A row is a path, with ``[]`` for every member of a list and ``=value`` for one value of a setting. When a
capability lands, its row goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.config.problems import Note
from gateway.config.references import Draft, Place

NOT_YET: dict[str, str] = {}


def notes_on(draft: Draft, table: Mapping[str, str]) -> tuple[Note, ...]:
    """A note for each setting of ``table``, which is as ``NOT_YET``, that the files set, in their order."""
    tops = [draft.top, *([Place(draft.keys_file, (), draft.keys_file.value)] if draft.keys_file else [])]
    return tuple(note for top in tops for note in sorted(_notes_below(top, table), key=lambda note: note.line))


def _notes_below(top: Place, table: Mapping[str, str]) -> Iterator[Note]:
    for row, message in table.items():
        path, _, value = row.partition("=")
        for place in _places(top, path.split(".")):
            if place.value is not None and (not value or place.value == value):
                problem = place.problem(message)
                yield Note(problem.file, problem.line, problem.path, problem.message)


def _places(place: Place, parts: list[str]) -> Iterator[Place]:
    if not parts:
        yield place
        return
    name, *rest = parts
    below = place.each(name.removesuffix("[]")) if name.endswith("[]") else [place.get(name)]
    for found in below:
        yield from _places(found, rest)
