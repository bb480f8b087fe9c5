"""Run a table of cases as one test item that names each failed row, instead of one item for each row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from _pytest.mark import ParameterSet


def each_row(
    names: str | tuple[str, ...], rows: Iterable[Any], ids: Callable[[Any], object] | Iterable[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test once for each row, as ``pytest.mark.parametrize`` does with the same arguments, and report all failed rows.

    For rows that are quick and leave nothing behind: they share the test's fixtures. The test fails with an ExceptionGroup, whose
    exceptions carry the names of their rows.
    """
    arguments = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    table = [_row(row, len(arguments)) for row in rows]
    titles = _titles(table, ids)
    assert table, "a table without rows tests nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        assert not inspect.iscoroutinefunction(test)

        @functools.wraps(test)
        def check(**fixtures: Any) -> None:
            failures: list[Exception] = []
            for title, row in zip(titles, table, strict=True):
                try:
                    test(**fixtures, **dict(zip(arguments, row, strict=True)))
                except Exception as error:
                    error.add_note(f"in the row {title}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        check.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # what pytest reads the fixtures from
        return check

    return decorate


def _row(row: Any, width: int) -> tuple[Any, ...]:
    if isinstance(row, ParameterSet):
        assert not row.marks, "a row has no marks of its own"
        return tuple(row.values)
    return (row,) if width == 1 else tuple(row)


def _titles(table: list[tuple[Any, ...]], ids: Callable[[Any], object] | Iterable[str] | None) -> list[str]:
    if ids is None:
        return [", ".join(map(repr, row)) for row in table]
    if callable(ids):
        return ["-".join(str(ids(value)) for value in row) for row in table]
    return list(ids)
