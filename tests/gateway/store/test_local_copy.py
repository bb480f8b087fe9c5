"""The copy of the store on the local disk."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.store.database import Changed, Changes
from gateway.store.entries import Position
from gateway.store.local_copy import LocalCopy

NONE = Changed({})


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[LocalCopy]:
    with closing(LocalCopy(tmp_path / "store" / "copy.db")) as made:
        yield made


def test_changes_add_up(copy: LocalCopy, tmp_path: Path) -> None:
    assert copy.read() is None
    assert copy.apply(Changes(Position(3, "c"), Changed({"a": "{}", "b": "{}"}), Changed({"ops": "{}"}), is_complete=True), 100.0)
    copy.apply(Changes(Position(5, "e"), Changed({"b": '{"x": 1}', "d": "{}"}, ["a"]), NONE), 101.5)
    with closing(LocalCopy(tmp_path / "store" / "copy.db")) as again:
        found = again.read()
    assert found is not None
    changes, confirmed = found
    assert (changes.position, changes.is_complete, confirmed) == (Position(5, "e"), True, 101.5)
    assert changes.keys.entries == {"b": '{"x": 1}', "d": "{}"}
    assert changes.teams.entries == {"ops": "{}"}
    copy.apply(Changes(Position(1, "z"), NONE, NONE, is_complete=True), 102.0)
    assert copy.read() == (Changes(Position(1, "z"), NONE, NONE, is_complete=True), 102.0)


def test_raises_are_copied_and_replaced_with_their_holder(copy: LocalCopy) -> None:
    first = {("key", "a"): "[1]", ("key", "yaml"): "[2]", ("team", "a"): "[3]"}
    copy.apply(Changes(Position(1, "a"), Changed({"a": "{}"}), NONE, is_complete=True, raises=first), 1.0)  # type: ignore[arg-type]
    copy.apply(Changes(Position(2, "b"), Changed({"a": "{}"}, ["yaml"]), NONE, raises={("key", "a"): "[4]"}), 2.0)
    found = copy.read()
    assert found is not None
    assert found[0].raises == {("key", "a"): "[4]", ("team", "a"): "[3]"}
    assert found[0].keys.entries == {"a": "{}"}
    copy.apply(Changes(Position(3, "c"), NONE, NONE, is_complete=True), 3.0)
    assert copy.read() == (Changes(Position(3, "c"), NONE, NONE, is_complete=True), 3.0)


def test_only_its_user_reads_it(copy: LocalCopy, tmp_path: Path) -> None:
    copy.apply(Changes(Position(1, "a"), NONE, NONE), 1.0)
    files = [tmp_path / "store", *(tmp_path / "store").iterdir()]
    assert [stat.S_IMODE(file.stat().st_mode) & 0o077 for file in files] == [0] * len(files)


def test_a_file_that_is_no_copy_is_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "copy.db"
    file.write_bytes(b"this is no database, but it is long enough to have a header" * 40)
    with closing(LocalCopy(file)) as copy:
        assert copy.read() is None
        assert not copy.apply(Changes(Position(1, "a"), NONE, NONE), 1.0)


def test_a_folder_that_cannot_be_created_is_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with closing(LocalCopy(tmp_path / "file" / "copy.db")) as copy:
        assert copy.read() is None
        assert not copy.apply(Changes(Position(1, "a"), NONE, NONE), 1.0)
