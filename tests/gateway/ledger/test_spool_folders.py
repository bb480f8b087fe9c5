"""Rows that wait on disk are found again after their configuration file was renamed or moved, and never reach another ledger's database."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from gateway.ledger.row import frame
from gateway.ledger.spool_folders import owner_of, spool_of
from tests.gateway.ledger.rows import payload
from tests.support.process import PROGRAM, Gateway, configuration, gateway, launched, wait_for, write

REQUESTS = 3


def serve_and_strand(folder: Path, file: Path) -> None:
    """Serve requests of which no row can reach the database, because its folder is missing."""
    write(file, configuration(launched()) | {"ledger": "sqlite:///db/usage.db"})
    with gateway(folder, None, line=(PROGRAM, "serve", file)) as one:
        for _ in range(REQUESTS):
            assert one.request().status_code == 200
        wait_for(lambda: one.get("/status").json()["ledger"]["waiting_rows"] == REQUESTS)
    assert len(spool_files(folder)) > 0


def spool_files(folder: Path) -> list[Path]:
    return list((folder / "vllm-gateway" / "ledger").glob("*/*.rows"))


def is_found(one: Gateway) -> bool:
    return one.get("/usage").json()["requests"] == REQUESTS and not spool_files(one.folder)


@pytest.mark.parametrize("move", ["nothing", "file", "folder"])
def test_rows_are_stored_after_the_configuration_was_renamed_or_moved(tmp_path: Path, move: str) -> None:
    before, after = tmp_path / "one", tmp_path / "other"
    before.mkdir()
    serve_and_strand(tmp_path, before / "a.yaml")
    file = before / "a.yaml"
    if move == "file":
        file = file.rename(before / "gateway.yaml")
    elif move == "folder":
        file = before.rename(after) / "a.yaml"
    (file.parent / "db").mkdir()
    with gateway(tmp_path, None, line=(PROGRAM, "serve", file)) as one:
        wait_for(lambda: is_found(one), why=lambda: one.output)


def strand(folders: Path, url: str, config: Path, number: int) -> Path:
    """Leave a row in the spool of a configuration. Return its folder."""
    with spool_of(owner_of(url, config), folders) as spooled:
        spooled.append(frame(payload(number)), 1)
        return spooled.folder


def test_rows_of_another_ledger_are_reported_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = strand(tmp_path, "postgresql://billing:geheim@db.example/usage?password=geheim&sslmode=require", tmp_path / "b.yaml", 1)
    unknown = tmp_path / "0123456789abcdef"
    shutil.copytree(other, unknown, ignore=shutil.ignore_patterns("owner.json"))
    with caplog.at_level(logging.WARNING), spool_of(owner_of("sqlite:///usage.db", tmp_path / "a.yaml"), tmp_path) as spooled:
        assert spooled.rows == 0
    assert f"rows of the ledger postgresql://billing@db.example/usage of {tmp_path / 'b.yaml'} wait in {other}" in caplog.text
    assert f"rows of an unknown ledger wait in {unknown}" in caplog.text
    assert "geheim" not in caplog.text + (other / "owner.json").read_text()


def test_an_existing_ledger_in_a_former_place_keeps_its_rows(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "usage.db").touch()
    strand(tmp_path / "spools", "sqlite:///usage.db", tmp_path / "one" / "gateway.yaml", 1)
    with spool_of(owner_of("sqlite:///usage.db", tmp_path / "two" / "gateway.yaml"), tmp_path / "spools") as spooled:
        assert spooled.rows == 0


def test_another_password_or_tls_setting_changes_nothing(tmp_path: Path) -> None:
    strand(tmp_path, "postgresql://u:one@db/usage", tmp_path / "a.yaml", 1)
    with spool_of(owner_of("postgresql://u:two@db/usage?sslmode=require", tmp_path / "b.yaml"), tmp_path) as spooled:
        assert spooled.rows == 1


def test_a_database_with_several_hosts_and_ports(tmp_path: Path) -> None:
    url = "postgresql://u:{}@a:5432,b:5433/usage?target_session_attrs=read-write"
    folder = strand(tmp_path, url.format("one"), tmp_path / "a.yaml", 1)
    with spool_of(owner_of(url.format("two"), tmp_path / "b.yaml"), tmp_path) as spooled:
        assert spooled.rows == 1
    assert "b:5433" in unquote((folder / "owner.json").read_text()) and "one" not in (folder / "owner.json").read_text()


def test_gateways_with_the_same_database_have_separate_folders(tmp_path: Path) -> None:
    url = "postgresql://u@db/usage"
    with spool_of(owner_of(url, tmp_path / "a.yaml"), tmp_path) as first:
        second = strand(tmp_path, url, tmp_path / "b.yaml", 1)
        assert second != first.folder and first.rows == 0
    with spool_of(owner_of(url, tmp_path / "a.yaml"), tmp_path) as first:  # the second gateway does not run any more
        assert first.rows == first.inherited == 1
    assert json.loads((second / "owner.json").read_text())["configuration"] == str(tmp_path / "b.yaml")
