"""What the admin port shows costs control little, however much there is of it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.controlled import controlled, on_demand
from tests.support.process import launched
from tests.support.running import until

A = "sim/a"


async def calls_for_a_status(folder: Path, count: int) -> int:
    """How many calls a status of so many models takes."""
    calls = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    os.mkdir(folder)
    async with controlled(folder, *(on_demand(f"m{number}") for number in range(count))) as one:
        one.report.status()  # at the first look the names of what relays count are read
        sys.setprofile(note)
        try:
            shown = one.report.status()
        finally:
            sys.setprofile(None)
        assert [len(model["servers"]) for model in shown["models"]] == [1] * count
    return calls


async def test_a_status_costs_as_much_for_each_model_however_many_there_are(tmp_path: Path) -> None:
    few, many = await calls_for_a_status(tmp_path / "few", 25), await calls_for_a_status(tmp_path / "many", 100)
    assert many < 5 * few


async def test_a_log_that_cannot_be_read_at_once_holds_up_nobody_else(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched(A)) as one:
        [server] = (await one.report.status_with_logs())["models"][0]["servers"]
        assert server["last_log_lines"] == one.control.launcher.log(f"{A}#0").tail().splitlines() != []
        os.unlink(server["log"])
        os.mkfifo(server["log"])
        asked = asyncio.create_task(one.report.status_with_logs())
        assert not (await asyncio.wait([asked], timeout=0.2))[0]
        assert (await one.ask(A)).status_code == 200 and one.state(A) == "ready"
        other_end = os.open(server["log"], os.O_RDWR)
        try:
            await until(asked.done)
        finally:
            os.close(other_end)
        assert asked.result()["models"][0]["servers"][0]["last_log_lines"] == []
