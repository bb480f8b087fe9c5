"""Log lines on standard error: their format and levels, limits on repeats, and no content of a request."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.system.logs import BURST, PARTS, Handler, JsonFormatter, LogSettings, Repeats, TextFormatter, configure, part_of, uncaught
from tests.gateway.config.test_problems import problems
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

ROOT = Path(__file__).resolve().parents[3]
CANARY = "canary-77c0"
TOUCHED = ("", "vllm_gateway", "upstream", "python_multipart", *PARTS.values())


def test_no_text_of_a_client_begins_a_line() -> None:
    logger, stream = logger_with_stream(TextFormatter("control"))
    logger.warning("refused %s", "a\n2027-01-01T00:00:00.000Z INFO control: forged\r\x1b[2J\x9b\u2028\u202eb\tc\ud800")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("refused a")
    assert second == r"  2027-01-01T00:00:00.000Z INFO control: forged\r\x1b[2J\x9b\u2028\u202eb\tc\ud800"


@pytest.fixture
def untouched() -> Iterator[None]:
    """Restore every logger after the test."""
    root = logging.getLogger()
    levels, handlers = {name: logging.getLogger(name).level for name in TOUCHED}, root.handlers[:]
    root.handlers[:] = [handler for handler in handlers if not isinstance(handler, Handler)]  # handlers of another test
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def logger_with_stream(formatter: logging.Formatter) -> tuple[logging.Logger, io.StringIO]:
    """Return a logger of the gateway and the stream to which it writes."""
    stream, logger = io.StringIO(), logging.Logger("vllm_gateway.worker")
    handler = Handler(stream)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return logger, stream


def raised_error(text: str) -> BaseException:
    try:
        try:
            raise OSError(28, "No space left on device", text)
        except OSError as error:
            raise KeyError(text) from error
    except KeyError as error:
        return error


def test_the_json_format() -> None:
    logger, stream = logger_with_stream(JsonFormatter("worker 3"))
    logger.error("request %s\nfailed", "req_1", exc_info=raised_error(CANARY), extra={"request_id": "req_1"})
    (written,) = stream.getvalue().splitlines()
    line = orjson.loads(written)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    trace = line.pop("trace")
    assert line == {"level": "error", "process": "worker 3", "part": "worker", "message": "request req_1\nfailed", "request_id": "req_1"}
    assert trace.startswith("builtins.KeyError, from\n") and "builtins.OSError (No space left on device), from\n" in trace
    assert "test_logs.py" in trace and "in raised_error" in trace


def test_a_line_of_text_begins_with_its_time_and_level() -> None:
    logger, stream = logger_with_stream(TextFormatter("worker 3"))
    logger.warning("request %s failed", "req_1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING worker 3: request req_1 failed\n", stream.getvalue())


def test_a_long_chain_of_causes_is_cut() -> None:
    error: Exception = ValueError()
    for _ in range(8):
        error, cause = KeyError(), error
        error.__cause__ = cause
    logger, stream = logger_with_stream(JsonFormatter("-"))
    logger.error("it failed", exc_info=error)
    trace = orjson.loads(stream.getvalue())["trace"]
    assert trace.count("builtins.KeyError") == 5 and "ValueError" not in trace


@pytest.mark.parametrize("formatter", [JsonFormatter("-"), TextFormatter("-")])
def test_the_message_of_an_error_is_not_logged(formatter: logging.Formatter) -> None:
    logger, stream = logger_with_stream(formatter)
    logger.error("it failed", exc_info=raised_error(CANARY))
    assert "KeyError" in stream.getvalue() and CANARY not in stream.getvalue()


def test_an_uncaught_error_shows_neither_message_nor_arguments(untouched: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(), "worker 0")
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(uncaught)
    loop.call_soon(int, CANARY)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    output = capsys.readouterr().err
    assert "builtins.ValueError" in output and CANARY not in output


def test_repeats_are_counted() -> None:
    repeats = Repeats(burst=2, window=5.0)
    assert [repeats.admits("a", 30, "x %s", now) for now in (0, 1, 2, 3)] == [True, True, False, False]
    assert repeats.admits("a", 30, "y", 3) and repeats.admits("a", 40, "x %s", 3)
    assert list(repeats.expired(4.9)) == []
    assert list(repeats.expired(5.0)) == [("a", 30, "x %s", 2)]
    assert repeats.admits("a", 30, "x %s", 5.1)
    assert list(repeats.expired(100.0)) == [], "what was all written is not told"


def test_the_memory_for_repeats_is_bounded() -> None:
    repeats = Repeats()
    for number in range(5000):
        assert repeats.admits("a", 30, f"text {number}", 0)
    assert len(repeats._kinds) <= 1000


def test_a_flood_becomes_a_few_lines_and_a_count() -> None:
    logger, stream = logger_with_stream(JsonFormatter("worker 0"))
    for number in range(1000):
        logger.warning("again %d", number)
    (handler,) = logger.handlers
    assert isinstance(handler, Handler)
    handler.report_suppressed(0.0)
    handler.report_suppressed(float("inf"))
    *lines, last = map(orjson.loads, stream.getvalue().splitlines())
    assert [line["message"] for line in lines] == [f"again {number}" for number in range(BURST)]
    suppressed = 1000 - BURST
    assert (last["message"], last["suppressed"], last["level"]) == (f"{suppressed} more lines like this: again %d", suppressed, "warning")


def test_each_part_has_its_level_and_libraries_are_quiet(untouched: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings("info", "text", {"fleet": "debug", "launcher": "error"}), "control")
    for name in (
        "vllm_gateway.fleet",
        "vllm_gateway.control",
        "upstream.launcher.server",
        "upstream.vllm.health",
        "httpx2",
        "python_multipart",
    ):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level)("%s %s", name, level)
    written = {tuple(line.split()[3:]) for line in capsys.readouterr().err.splitlines()}
    fleet = {("vllm_gateway.fleet", level) for level in ("debug", "info", "warning", "error")}
    infos = {(name, level) for name in ("vllm_gateway.control", "upstream.vllm.health") for level in ("info", "warning", "error")}
    assert written == fleet | infos | {
        ("upstream.launcher.server", "error"), ("httpx2", "warning"), ("httpx2", "error"), ("python_multipart", "error"),
    }  # fmt: skip
    configure(LogSettings("error"), "control")
    assert not logging.getLogger("vllm_gateway.fleet").isEnabledFor(logging.WARNING), "settings that are gone leave nothing behind"


def test_a_failed_write_to_standard_error_is_ignored(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        handler = Handler(full)
        handler.emit(logging.LogRecord("a", 30, "", 0, "x", None, None))
        with pytest.raises(OSError, match="No space"):
            full.flush()
        with pytest.raises(OSError, match="No space"):
            full.close()


def test_every_logger_belongs_to_a_part() -> None:
    logger_names = {
        name if name != "__name__" else ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for folder in ("gateway", "upstream")
        for file in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'getLogger\("?([\w.]+)"?\)', file.read_text())
        if name in ("__name__",) or name.startswith("vllm_gateway.")
    }
    assert {part_of(name) for name in logger_names} == set(PARTS), "gateway.system.logs.PARTS names the parts that can have a level"


def test_an_unknown_part_is_a_problem(tmp_path: Path) -> None:
    text = "models: [{id: m, launch: {}}]\nkeys: [{id: k, anonymous: true}]\nlog: {levels: {fleets: debug, fleet: loud}}\n"
    first, second = sorted(problems(tmp_path, text))
    assert "log.levels.fleet: " in first and "`debug`" in first
    assert "there is no such part of the gateway; did you mean `fleet`?" in second


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that logs in JSON."""
    config = configuration(launched(), launched("sim/bad", **{"reasoning-parser": "no_such_parser"}), port=0)
    with gateway(tmp_path_factory.mktemp("json"), config | {"log": {"format": "json", "level": "debug"}}) as one:
        yield one


def lines(one: Gateway) -> list[dict[str, Any]]:
    """Return the complete lines that the gateway has logged."""
    return [orjson.loads(line) for line in one.output.rpartition("\n")[0].splitlines()]


def test_every_line_of_standard_error_is_an_object(machine: Gateway) -> None:
    wait_for(lambda: "servers up" in machine.output)
    written = lines(machine)
    assert all({"time", "level", "process", "part", "message"} <= line.keys() for line in written)
    assert {"process": "control", "part": "control", "model": "sim/one"}.items() <= written[0].items()
    failure = next(line for line in written if "no_such_parser" in line["message"] and line["level"] == "error")
    assert failure["process"] == "control" and "\n" not in failure["message"]
    assert any(line["message"].startswith("ready: 1 of 2") for line in written)


def test_the_exit_of_a_worker_is_logged_in_the_same_format(machine: Gateway) -> None:
    os.kill(machine.workers()[0], signal.SIGKILL)
    wait_for(lambda: "worker 0 exited unexpectedly" in machine.output)
    wait_for(lambda: machine.get("/readyz").status_code == 200)
    assert all(lines(machine))
