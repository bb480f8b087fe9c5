"""The launcher's pure parts, and its log file."""

import os
from pathlib import Path

import pytest

from upstream.launcher.lifecycle import TRANSITIONS, LaunchState, RestartPolicy, describe_exit
from upstream.launcher.logfile import RECENT, TAIL_BYTES, TAIL_LINES, LogFile


def test_pauses_double_up_to_the_cap() -> None:
    backoff = RestartPolicy(first=1, cap=10)
    assert [backoff.pause(failures) for failures in (1, 2, 3, 4, 5, 6, 10**6)] == [1, 2, 4, 8, 10, 10, 10]


def test_no_link_in_the_folder_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 2000)
    log = LogFile(tmp_path, "m#0", limit=1000)
    log.path.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"), log.appending():
        pass
    assert log.tail() == log.progress() == ""
    log.path.unlink()
    write(log, b"y" * 2000)
    log.path.with_suffix(".log.1").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        log.rotate()
    assert secret.read_text() == "x" * 2000


def test_a_good_while_of_readiness_forgives_the_past() -> None:
    backoff = RestartPolicy(reset_after=300)
    assert backoff.count_failures(0, 0.0) == 1
    assert backoff.count_failures(4, 299.0) == 5
    assert backoff.count_failures(4, 300.0) == 1


@pytest.mark.parametrize(
    ("status", "memory_kills", "text"),
    [
        (0, 0, "exit code 0"),
        (2, None, "exit code 2"),
        (-9, 0, "signal SIGKILL"),
        (-63, 0, "signal 63"),
        (None, 0, "its shim was killed"),
        (-9, 1, "killed by the kernel for lack of memory (SIGKILL)"),
        (-9, None, "killed by SIGKILL, perhaps by the kernel for lack of memory"),
        (0, 1, "exit code 0, and the kernel has killed a process for lack of memory meanwhile"),
        (None, 2, "its shim was killed, and the kernel has killed a process for lack of memory meanwhile"),
    ],
)
def test_the_text_of_an_exit(status: int | None, memory_kills: int | None, text: str) -> None:
    assert describe_exit(status, memory_kills).text == text


def test_every_state_has_its_row_and_all_but_the_last_can_be_stopped() -> None:
    assert TRANSITIONS.keys() == set(LaunchState)
    assert all(
        LaunchState.STOPPING in after for state, after in TRANSITIONS.items() if state not in (LaunchState.STOPPING, LaunchState.STOPPED)
    )
    assert TRANSITIONS[LaunchState.STOPPED] == frozenset()


def write(log: LogFile, text: bytes) -> None:
    with log.appending() as fd:
        os.write(fd, text)


def test_the_tail_is_of_the_present_process(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "m#0")
    write(log, b"old\n")
    write(log, b"one\ntwo\n")
    assert log.tail() == "one\ntwo"
    assert log.path.read_bytes() == b"old\none\ntwo\n"


def test_what_was_written_lately_leaves_out_what_is_older(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "m#0")
    write(log, b"before\n")
    write(log, b"old\n")
    assert log.text() == log.text(recent=True) == "old\n"
    for _ in range(RECENT):
        log.rotate()
    with open(log.path, "ab") as file:
        file.write(b"new\n")
    assert (log.text(recent=True), log.text()) == ("new\n", "old\nnew\n")


def test_the_tail_is_bounded_and_printable(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "m#0")
    write(log, b"".join(b"line %d\n" % number for number in range(100)))
    assert log.tail().splitlines() == [f"line {number}" for number in range(100 - TAIL_LINES, 100)]
    write(log, b"x" * 10 * TAIL_BYTES)
    assert len(log.tail()) == TAIL_BYTES
    write(log, b"\x1b[31mred\x1b[0m \xff \x07 gr\xc3\xbcn")
    assert log.tail() == "[31mred[0m \ufffd  grün"


def test_no_log_has_an_empty_tail(tmp_path: Path) -> None:
    assert LogFile(tmp_path, "m#0").tail() == ""


def test_similar_names_have_separate_logs(tmp_path: Path) -> None:
    names = ("a/b#0", "a--b#0", "a_b#0", "a%2Fb#0", "../a#0", "..")
    paths = {LogFile(tmp_path, name).path for name in names}
    assert len(paths) == len(names)
    assert {path.parent for path in paths} == {tmp_path}


def test_a_log_above_its_limit_is_truncated_and_the_writer_continues(tmp_path: Path) -> None:
    log = LogFile(tmp_path, "m#0", limit=1000)
    with log.appending() as fd:
        os.write(fd, b"a" * 1000)
        log.rotate()
        assert log.path.stat().st_size == 1000
        os.write(fd, b"bc")
        log.rotate()
        os.write(fd, b"next\n")
    assert log.path.read_bytes() == b"next\n"
    assert log.tail() == "next"
    older = tmp_path / "m#0.log.1"
    assert older.read_bytes() == b"a" * 998 + b"bc"
    assert older.stat().st_mode & 0o777 == 0o600
