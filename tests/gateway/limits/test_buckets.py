"""Meters that several processes share: exact, and nothing is left of one that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from gateway.limits.buckets import Meters
from gateway.limits.rules import DAY, USED, Ask, moment
from gateway.snapshot.snapshot import Limits

LIMITS = Limits(tokens_per_day=1000, concurrent=10)
WALL = 1_800_000_000.0
TAKER = """
import sys
from gateway.limits.buckets import Meters
from gateway.limits.rules import Ask, moment
from gateway.snapshot.snapshot import Limits

fd, worker = map(int, sys.argv[1:3])
meters = Meters.inherited(fd, worker)
holder = meters.holder("key a", Limits(tokens_per_day=1000, concurrent=10))
at, taken, ends = moment(0.0, 1_800_000_000.0), 0, {}
sys.stdin.readline()
while meters.take([(holder, Ask(slots=1, tokens=1))], at, ends) is None:
    taken += 1
    meters.settle([(holder, Ask(slots=1, tokens=1))], ends, Ask(tokens=1), at, 0.0)
meters.take([(holder, Ask(slots=2))], at, ends)
print(taken, flush=True)
sys.stdin.readline()
"""


@contextmanager
def shared(workers: int) -> Iterator[Meters]:
    meters = Meters.create("test", workers)
    try:
        yield meters
    finally:
        meters.close()


@contextmanager
def taker(meters: Meters, worker: int) -> Iterator[subprocess.Popen[str]]:
    """A process that takes a token at a time until there is none, and then two places, which it keeps."""
    words = [sys.executable, "-P", "-c", TAKER, str(meters.fd), str(worker)]
    with subprocess.Popen(words, pass_fds=(meters.fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_count_together_and_a_dead_ones_places_come_back() -> None:
    with shared(3) as meters:
        holder = meters.holder("key a", LIMITS)
        with taker(meters, 0) as first, taker(meters, 1) as second, taker(meters, 2) as third:
            processes = (first, second, third)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            taken = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
            assert sum(taken) == 1000
            assert meters.in_flight(holder.meter) == 6
            second.kill()
            second.wait()
        Meters.inherited(os.dup(meters.fd), 1).close()
        assert meters.in_flight(holder.meter) == 4, "the successor begins with none of its own"
        assert meters.cells[holder.meter + DAY + USED] == 1000


def test_a_process_that_dies_with_the_lock_leaves_it() -> None:
    code = "import sys, fcntl, time; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    with shared(2) as meters:
        holder = meters.holder("key a", LIMITS)
        words = [sys.executable, "-c", code, str(meters.fd)]
        with subprocess.Popen(words, pass_fds=(meters.fd,), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            process.kill()
        assert said == "held\n"
        assert meters.take([(holder, Ask(tokens=1))], moment(monotonic(), WALL), {}) is None


def test_a_name_is_a_meter() -> None:
    meters = Meters.private()
    holder = meters.holder("key a", LIMITS)
    assert meters.take([(holder, Ask(tokens=400))], moment(0.0, WALL), {}) is None
    again = meters.holder("key a", Limits(tokens_per_day=500))
    other = meters.holder("key b", LIMITS)
    assert again.meter == holder.meter != other.meter
    refused = meters.take([(other, Ask(tokens=1)), (again, Ask(tokens=200))], moment(0.0, WALL), {})
    assert refused is not None and refused[0] is again
    assert meters.cells[other.meter + DAY + USED] == 0, "from all or from none"


@pytest.mark.parametrize("used", [0, 400, 700])
def test_settling(used: int) -> None:
    meters = Meters.private()
    holder, at = meters.holder("key a", LIMITS), moment(0.0, WALL)
    reserved = [(holder, Ask(slots=1, tokens=400))]
    ends: dict[int, float] = {}
    assert meters.take(reserved, at, ends) is None
    meters.settle(reserved, ends, Ask(tokens=used), at, 5.0)
    assert (meters.in_flight(holder.meter), meters.cells[holder.meter + DAY + USED]) == (0, used)
