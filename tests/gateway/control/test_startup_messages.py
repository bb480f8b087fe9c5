"""Messages for the operator on standard error."""

from __future__ import annotations

import io
import re
import signal
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from gateway.config import load
from gateway.control.serve import StartError, listen
from gateway.control.startup_messages import Announcer
from tests.support.process import PROGRAM, configuration, gateway, launched, wait_for, write
from upstream.http.address import Address
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.vllm.failures import Cause
from upstream.vllm.health import ServerHealth


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]"), ("::", "localhost")])
def test_the_shown_addresses_can_be_used_by_a_client(tmp_path: Path, host: str, shown: str) -> None:
    write(tmp_path / "gateway.yaml", configuration(launched()))
    output = io.StringIO()
    try:
        data, admin = listen(host, 0, "server.port"), listen(host, 0, "server.admin.port")
    except StartError as error:
        pytest.skip(f"this machine has no such address: {error}")
    with closing(data), closing(admin):
        Announcer(Console(file=output, width=200)).summary(load(tmp_path / "gateway.yaml"), data, admin)
        assert f"http://{shown}:{data.getsockname()[1]}/v1 " in output.getvalue()
        assert f"http://{shown}:{admin.getsockname()[1]}/metrics " in output.getvalue()
        assert ("listens on all addresses" in output.getvalue()) == (host in ("0.0.0.0", "::"))


def test_messages_that_cannot_be_written_stop_nothing(tmp_path: Path) -> None:
    write(tmp_path / "gateway.yaml", configuration(launched()))
    with ExitStack() as stack:
        full = stack.enter_context(io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True))
        data, admin = (stack.enter_context(closing(listen("127.0.0.1", 0, "server.port"))) for _ in range(2))
        announcer = Announcer(Console(file=full))
        announcer.summary(load(tmp_path / "gateway.yaml"), data, admin)
        announcer.stopped()


def test_a_reader_of_the_messages_that_exits_does_not_stop_the_gateway(tmp_path: Path) -> None:
    write(tmp_path / "gateway.yaml", configuration(launched()))
    line = ("bash", "-c", 'exec "$0" serve "$1" 2> >(sed -u "/^metrics /q" >&2)', PROGRAM, tmp_path / "gateway.yaml")
    with gateway(tmp_path, None, line=line) as one:
        assert "is up" not in one.output
        assert httpx2.get(f"http://127.0.0.1:{one.admin}/livez", timeout=60).status_code == 200
        one.process.send_signal(signal.SIGHUP)
        wait_for(lambda: one.metric('vllm_gateway_config_reloads_total{outcome="success"}') == 1)
        assert one.request().status_code == 200
        assert one.stop() == 0


def test_the_table_in_a_file_is_not_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"id": "m" * 90, "aliases": ["a" * 90], "servers": [{"url": f"http://127.0.0.1:{port}"} for port in range(1, 9)]}
    write(tmp_path / "gateway.yaml", configuration(model))
    with closing(listen("127.0.0.1", 0, "server.port")) as data, closing(listen("127.0.0.1", 0, "server.port")) as admin:
        Announcer().summary(load(tmp_path / "gateway.yaml"), data, admin)
    [row] = [line for line in capsys.readouterr().err.splitlines() if "m" * 90 in line]
    assert "a" * 90 in row and "http://127.0.0.1:8" in row


def test_a_server_that_does_not_run_is_reported_with_a_hint() -> None:
    output = io.StringIO()
    reason = "GET /health: ConnectionRefusedError: [Errno 111] Connect call failed"
    Announcer(Console(file=output, width=200)).probed(ServerHealth("m#0", False, reason))
    assert "Hint: Nothing listens at this address." in output.getvalue()


def test_awaited_servers_are_one_line_that_is_repeated_ever_more_rarely() -> None:
    output = io.StringIO()
    announcer = Announcer(Console(file=output, width=200))
    for seconds in range(5, 45, 5):
        announcer.waiting(["a#0", "b#0", "c#0", "d#0"], seconds, lambda name: f"{name} loads")
    announcer.waiting(["d#0"], 45, lambda name: f"{name} loads")
    lines = [re.sub(TIMED, "", line) for line in output.getvalue().splitlines()]
    waited = [f"waiting for 4 servers ({seconds} s): a#0, b#0, c#0 and 1 more" for seconds in (5, 10, 20, 40)]
    assert lines == [*waited, "waiting for d#0 (45 s)  d#0 loads"]


def test_no_server_that_is_up_is_an_error() -> None:
    output = io.StringIO()
    announcer = Announcer(Console(file=output, width=200))
    for up, total in ((0, 0), (1, 2), (0, 2)):
        announcer.serving(up, total)
    lines = [re.sub(TIMED, r"\1 ", line) for line in output.getvalue().splitlines()]
    assert lines == ["INFO ready: models start on demand", "INFO ready: 1 of 2 servers up", "ERROR no server is up (of 2)"]


TIMED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) (control|worker \d+): "
KNOWN = Cause("kv_cache_too_small", "no memory is left", "Raise it.", "ValueError: No available memory")
FAILED = LaunchStatus(
    "m#0",
    LaunchState.FAILED,
    0.0,
    Address("localhost"),
    Path("/m.log"),
    reason="m#0 could not start: no memory is left",
    cause=KNOWN,
    tail="a\nb",
)


def announced(*statuses: LaunchStatus) -> list[str]:
    """Return the lines that are written for these changes, without their time."""
    output = io.StringIO()
    announcer = Announcer(Console(file=output, width=200))
    for status in statuses:
        announcer.launched(status)
    return [re.sub(TIMED, r"\1 ", line) for line in output.getvalue().splitlines()]


def test_a_known_cause_comes_with_its_hint_and_without_the_log() -> None:
    assert announced(FAILED) == ["ERROR m#0 could not start: no memory is left", "  Hint: Raise it."]


def test_an_unknown_cause_is_shown_with_the_end_of_the_log() -> None:
    unknown = replace(FAILED, reason="m#0 could not start: exit code 3", cause=Cause("unknown", "", "Read the log."))
    lines = ["ERROR m#0 could not start: exit code 3", "  Hint: Read the log.", "  The last lines of /m.log:", "  | a", "  | b"]
    assert announced(unknown) == lines


def test_a_failure_that_repeats_adds_one_line_until_the_server_is_up_again() -> None:
    other = replace(FAILED, cause=replace(KNOWN, code="disk_full", hint="Free it."))
    up = replace(FAILED, state=LaunchState.READY, reason="", cause=None)
    line, hint = "ERROR m#0 could not start: no memory is left", "  Hint: Raise it."
    assert announced(FAILED, FAILED, FAILED) == [line, hint, line, line]
    assert announced(FAILED, other, FAILED) == [line, hint, line, "  Hint: Free it.", line, hint]
    assert announced(FAILED, up, FAILED) == [line, hint, "INFO m#0 is up", line, hint]


def test_a_gateway_that_is_stopped_reports_no_server_as_down_and_ends_with_stopped(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), launched("sim/two"))) as one:
        wait_for(lambda: "sim/one#0 is up" in one.output and "sim/two#0 is up" in one.output)
        assert one.stop(signal.SIGTERM) == 0
        assert "is down" not in one.output and "ended" not in one.output
        summary, ready, rest = one.output.partition(next(line for line in one.output.splitlines(keepends=True) if re.match(TIMED, line)))
        assert "requests  http://" in summary + ready + rest
        lines = [line for line in (ready + rest).splitlines() if not line.startswith(("requests ", "metrics "))]
        assert all(re.match(TIMED, line) for line in lines), lines
        assert lines[-1].endswith("INFO control: stopped")


def test_a_model_that_the_operator_stops_is_not_reported_as_down(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), launched("sim/two"))) as one:
        assert one.command("stop", "sim/two").returncode == 0
        wait_for(lambda: "sim/two stops (" in one.output)
        assert one.stop() == 0
        assert "is down" not in one.output
