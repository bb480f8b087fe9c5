"""Rows that no disk and no database takes: they are counted while they wait, and written to standard error at the end."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.ledger.last_resort import write_out
from gateway.ledger.row import LOST
from tests.gateway.ledger.rows import payload
from tests.support import full_disk
from tests.support.full_disk import Disk
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY

REQUESTS = 41


def written(text: str) -> list[dict[str, Any]]:
    """The rows among the lines of standard error."""
    return [json.loads(line)["ledger_row"] for line in text.splitlines() if line.startswith('{"ledger_row":')]


def in_database(disk: Disk) -> set[str]:
    """The ids in the ledger's database. Its files are copied: SQLite writes beside a database that it only reads."""
    copied = disk.gateway.folder / "copied"
    copied.mkdir(exist_ok=True)
    for file in disk.path().glob("usage.db*"):
        (copied / file.name).write_bytes(file.read_bytes())
    with closing(sqlite3.connect(copied / "usage.db")) as connection:
        return {identity for (identity,) in connection.execute("SELECT request_id FROM gateway_usage")}


def test_each_row_is_a_line_with_the_names_of_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    write_out([payload(1), b"\xc1 no MessagePack", payload(2, incomplete=LOST)], stream)
    rows = written(stream.getvalue())
    assert [(row["id"], row["key"], row["incomplete"]) for row in rows] == [("req_1", "team-a", None), ("req_2", "team-a", LOST)]
    assert "3 rows of the ledger cannot be stored" in caplog.text


def test_a_closed_standard_error_raises_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    write_out([payload(1)], stream)


def settings(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return a configuration whose ledger and spool are in one folder, and that folder."""
    ledger_folder = folder / "vllm-gateway" / "ledger"
    return configuration(launched()) | {"ledger": f"sqlite:///{ledger_folder}/usage.db"}, ledger_folder


def waiting(one: Gateway) -> float:
    return one.metric("vllm_gateway_ledger_memory_rows")


def test_on_a_full_disk_no_row_is_lost_silently(tmp_path: Path) -> None:
    if not full_disk.allowed():
        pytest.skip(full_disk.NOT_ALLOWED)
    config, ledger_folder = settings(tmp_path)
    (tmp_path / "gateway.yaml").write_text(json.dumps(config))
    with gateway(tmp_path, None, line=full_disk.line(tmp_path, ledger_folder)) as one:
        disk = Disk(one, ledger_folder)
        first = one.request().headers["x-request-id"]
        wait_for(lambda: one.metric('vllm_gateway_ledger_rows_total{outcome="written"}') == 1, 60)
        assert in_database(disk) == {first}

        disk.fill()
        sent = {one.request().headers["x-request-id"] for _ in range(REQUESTS)}
        wait_for(lambda: waiting(one) == REQUESTS and one.get("/status").json()["ledger"]["unavailable"], why=lambda: one.output)
        state = one.get("/status").json()
        assert (state["ledger"]["memory_rows"], state["ledger"]["waiting_rows"], state["ledger"]["dropped_rows"]) == (REQUESTS, REQUESTS, 0)
        assert state["ledger"]["memory_bytes"] == one.metric("vllm_gateway_ledger_memory_bytes") > 0
        wait_for(lambda: one.get("/status").json()["degraded"] == ["ledger_database is down", "ledger_spool is down"])
        assert [one.metric(f'vllm_gateway_dependency_up{{dependency="ledger_{part}"}}') for part in ("database", "spool")] == [0, 0]

        disk.free()
        wait_for(lambda: waiting(one) == 0 and one.get("/readyz").json() == {"status": "ready", "reasons": []}, 60, why=lambda: one.output)
        wait_for(lambda: one.metric('vllm_gateway_ledger_rows_total{outcome="written"}') == 1 + REQUESTS, 60)
        assert in_database(disk) == {first, *sent}
        assert "the ledger's spool can be written again" in one.output

        disk.fill()
        lost = {one.request().headers["x-request-id"] for _ in range(REQUESTS)}
        wait_for(lambda: waiting(one) == REQUESTS)
        assert one.stop() == 0
    rows = written(one.output)
    assert {row["id"] for row in rows} == lost and len(rows) == REQUESTS
    assert f"{REQUESTS} rows of the ledger cannot be stored" in one.output
    assert "Hello" not in one.output and KEY not in one.output


def test_a_spool_that_is_full_is_shown_and_rows_go_to_the_database(tmp_path: Path) -> None:
    if not full_disk.allowed():
        pytest.skip(full_disk.NOT_ALLOWED)
    config, ledger_folder = settings(tmp_path)
    config["ledger"] = "sqlite:///usage.db"
    (tmp_path / "gateway.yaml").write_text(json.dumps(config))
    with gateway(tmp_path, None, line=full_disk.line(tmp_path, ledger_folder)) as one:
        Disk(one, ledger_folder).fill()
        one.request()
        wait_for(lambda: one.metric('vllm_gateway_ledger_rows_total{outcome="written"}') == 1, 60)
        assert one.get("/readyz").json() == {"status": "degraded", "reasons": ["ledger_spool is down"]}
        assert waiting(one) == 0
        Disk(one, ledger_folder).free()
        wait_for(lambda: one.get("/readyz").json()["status"] == "ready", 60, why=lambda: one.output)


def test_workers_whose_control_is_killed_write_out_what_the_full_disk_does_not_take(tmp_path: Path) -> None:
    if not full_disk.allowed():
        pytest.skip(full_disk.NOT_ALLOWED)
    config, ledger_folder = settings(tmp_path)
    (tmp_path / "gateway.yaml").write_text(json.dumps(config))
    with gateway(tmp_path, None, line=full_disk.line(tmp_path, ledger_folder)) as one:
        Disk(one, ledger_folder).fill()
        sent = {one.request().headers["x-request-id"] for _ in range(3)}
        wait_for(lambda: waiting(one) == 3)
        one.process.kill()
        one.process.wait()
        wait_for(lambda: {row["id"] for row in written(one.output)} >= sent, why=lambda: one.output)
