"""Buckets shared by several processes: counts are exact, and a killed process leaves nothing reserved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from gateway.limits.buckets import Buckets
from gateway.limits.rules import DAY, Amounts
from gateway.limits.windows import USED, moment
from gateway.snapshot.snapshot import Limits

LIMITS = Limits(tokens_per_day=1000, concurrent=10)
WALL = 1_800_000_000.0
TAKER = """
import sys
from gateway.limits.buckets import Buckets
from gateway.limits.rules import Amounts
from gateway.limits.windows import moment
from gateway.snapshot.snapshot import Limits

fd, worker = map(int, sys.argv[1:3])
buckets = Buckets.inherited(fd, worker)
holder = buckets.holder("key a", Limits(tokens_per_day=1000, concurrent=10))
at, taken, ends = moment(0.0, 1_800_000_000.0), 0, {}
sys.stdin.readline()
while buckets.reserve([(holder, Amounts(slots=1, tokens=1))], at, ends) is None:
    taken += 1
    buckets.settle([(holder, Amounts(slots=1, tokens=1))], ends, Amounts(tokens=1), at, 0.0)
buckets.reserve([(holder, Amounts(slots=2))], at, ends)
print(taken, flush=True)
sys.stdin.readline()
"""


@contextmanager
def shared(workers: int) -> Iterator[Buckets]:
    buckets = Buckets.create("test", workers)
    try:
        yield buckets
    finally:
        buckets.close()


@contextmanager
def taker(buckets: Buckets, worker: int) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes one token at a time until none is left, then takes two slots and keeps them."""
    command = [sys.executable, "-P", "-c", TAKER, str(buckets.fd), str(worker)]
    with subprocess.Popen(command, pass_fds=(buckets.fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_count_together_and_slots_of_a_dead_process_are_released() -> None:
    with shared(3) as buckets:
        holder = buckets.holder("key a", LIMITS)
        with taker(buckets, 0) as first, taker(buckets, 1) as second, taker(buckets, 2) as third:
            processes = (first, second, third)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            taken = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
            assert sum(taken) == 1000
            assert buckets.in_flight(holder.offset) == 6
            second.kill()
            second.wait()
        Buckets.inherited(os.dup(buckets.fd), 1).close()
        assert buckets.in_flight(holder.offset) == 4, "the successor begins with none of its own"
        assert buckets.cells[holder.offset + DAY + USED] == 1000


def test_the_lock_of_a_process_that_dies_is_released() -> None:
    code = "import sys, fcntl, time; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    with shared(2) as buckets:
        holder = buckets.holder("key a", LIMITS)
        command = [sys.executable, "-c", code, str(buckets.fd)]
        with subprocess.Popen(command, pass_fds=(buckets.fd,), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.kill()
        assert line == "held\n"
        assert buckets.reserve([(holder, Amounts(tokens=1))], moment(monotonic(), WALL), {}) is None


def test_a_name_identifies_a_bucket() -> None:
    buckets = Buckets.private()
    holder = buckets.holder("key a", LIMITS)
    assert buckets.reserve([(holder, Amounts(tokens=400))], moment(0.0, WALL), {}) is None
    again = buckets.holder("key a", Limits(tokens_per_day=500))
    other = buckets.holder("key b", LIMITS)
    assert again.offset == holder.offset != other.offset
    refused = buckets.reserve([(other, Amounts(tokens=1)), (again, Amounts(tokens=200))], moment(0.0, WALL), {})
    assert refused is not None and refused[0] is again
    assert buckets.cells[other.offset + DAY + USED] == 0, "from all or from none"


@pytest.mark.parametrize("used", [0, 400, 700])
def test_settling(used: int) -> None:
    buckets = Buckets.private()
    holder, at = buckets.holder("key a", LIMITS), moment(0.0, WALL)
    reserved = [(holder, Amounts(slots=1, tokens=400))]
    end_times: dict[int, float] = {}
    assert buckets.reserve(reserved, at, end_times) is None
    buckets.settle(reserved, end_times, Amounts(tokens=used), at, 5.0)
    assert (buckets.in_flight(holder.offset), buckets.cells[holder.offset + DAY + USED]) == (0, used)
