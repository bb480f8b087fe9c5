"""Control reports to the operator at the event, and not later."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.controlled import controlled
from tests.support.process import launched
from tests.support.running import until


async def test_readiness_is_reported_at_the_event_that_completes_it(tmp_path: Path) -> None:
    """The announcer's interval, an hour here, is a timeout and delays nothing."""
    async with controlled(tmp_path, launched()) as one:
        await until(lambda: "ready: 1 of 1 servers up" in one.output.getvalue())


async def test_a_cordoned_server_gets_no_requests_until_it_is_uncordoned(tmp_path: Path) -> None:
    model = launched()
    model["launch"] |= {"replicas": 2}
    async with controlled(tmp_path, model) as one:
        cordoned, other = (f"sim/one#{number}" for number in range(2))
        [stream] = await one.streams("sim/one")
        for name in (cordoned, other):
            await one.operations.cordon(name)
        assert (await one.request("sim/one")).json()["error"]["code"] == "no_healthy_server"
        await one.operations.uncordon(other)
        assert (await stream).text.endswith("data: [DONE]\n\n"), "open requests finish"
        states = {server["name"]: server.get("cordoned", False) for server in one.status("sim/one")["servers"]}
        assert states == {cordoned: True, other: False}
        pid = one.pids("sim/one")[0]
        os.kill(pid, signal.SIGSTOP)  # a request to it would not end
        try:
            for _ in range(4):
                assert (await one.request("sim/one")).status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        await one.operations.uncordon(cordoned)
        await until(lambda: "cordoned" not in one.status("sim/one")["servers"][0])
        await until(lambda: one.control.readiness.degraded() == [])
