"""Buckets shared by several processes: counts are exact, and a killed process leaves nothing reserved."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread
from time import monotonic, sleep

import pytest

from gateway.limits.decision import DAY, SIZE, Amounts
from gateway.limits.shared_counts import Buckets, BucketsFullError
from gateway.limits.windows import USED, moment
from gateway.snapshot.snapshot import Budget, Limits

LIMITS = Limits(tokens_per_day=1000, concurrent=10)
WALL = 1_800_000_000.0
TAKER = """
import sys
from gateway.limits.shared_counts import Buckets
from gateway.limits.decision import Amounts
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
            assert buckets.in_flight(holder) == 6
            second.kill()
            second.wait()
        Buckets.inherited(os.dup(buckets.fd), 1).close()
        assert buckets.in_flight(holder) == 4, "the successor begins with none of its own"
        assert buckets.cells[holder.offset + DAY + USED] == 1000


HOLDER = "import sys, fcntl, time; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"


@contextmanager
def locked_elsewhere(buckets: Buckets) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lock until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(buckets.fd)], pass_fds=(buckets.fd,), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_lock_of_a_process_that_dies_is_released() -> None:
    with shared(2) as buckets:
        holder = buckets.holder("key a", LIMITS)
        with locked_elsewhere(buckets) as process:
            process.kill()
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


def test_an_observer_finds_what_is_counted_and_nothing_for_an_unknown_holder() -> None:
    limits = Limits(tokens_per_day=1000, budgets=(Budget("7d", 7 * 86400, tokens=500),))
    with shared(1) as control, closing(Buckets.inherited(os.dup(control.fd), 0)) as worker:
        at = moment(0.0, WALL)
        assert [(each.budget.name, each.used) for each in control.shown_states("key a", limits, at)] == [
            ("tokens_per_day", 0),
            ("tokens_per_7d", 0),
        ]
        assert (control.is_counted("key a"), control.shown_cell("key a", DAY + USED)) == (False, 0.0)
        assert worker.reserve([(worker.holder("key a", limits), Amounts(tokens=30))], at, {}) is None
        assert [each.used for each in control.shown_states("key a", limits, at)] == [30, 30]
        assert (control.is_counted("key a"), control.shown_cell("key a", DAY + USED)) == (True, 30.0)


@pytest.mark.parametrize("used", [0, 400, 700])
def test_settling(used: int) -> None:
    buckets = Buckets.private()
    holder, at = buckets.holder("key a", LIMITS), moment(0.0, WALL)
    reserved = [(holder, Amounts(slots=1, tokens=400))]
    end_times: dict[int, float] = {}
    assert buckets.reserve(reserved, at, end_times) is None
    buckets.settle(reserved, end_times, Amounts(tokens=used), at, 5.0)
    assert (buckets.in_flight(holder), buckets.cells[holder.offset + DAY + USED]) == (0, used)


def test_control_writes_after_the_only_worker_has_acknowledged() -> None:
    with shared(1) as control, closing(Buckets.inherited(os.dup(control.fd), 0)) as worker:
        for _ in range(2):
            control.announce_writes()
            before = control.may_write
            worker.tick()
            assert (before, control.may_write) == (False, True)
            control.end_writes()
            worker.tick()


def test_control_writes_at_once_before_a_worker_attaches() -> None:
    with shared(1) as control:
        control.announce_writes()
        assert control.may_write
        with closing(Buckets.inherited(os.dup(control.fd), 0)):
            assert control.may_write, "it has seen the announcement when it attached"


def test_the_only_worker_waits_for_no_lock() -> None:
    """Another process holds the lock. Without an announcement the worker serves."""
    with shared(1) as control, closing(Buckets.inherited(os.dup(control.fd), 0)) as worker:
        reserved, at = [(worker.holder("key a", LIMITS), Amounts(tokens=1))], moment(0.0, WALL)
        with locked_elsewhere(control):
            assert worker.reserve(reserved, at, {}) is None
            worker.settle(reserved, {}, Amounts(tokens=2), at, 1.0)


COUNTER = """
import sys
from gateway.limits.shared_counts import Buckets
from gateway.limits.decision import Amounts
from gateway.limits.windows import moment
from gateway.snapshot.snapshot import Limits

buckets = Buckets.inherited(int(sys.argv[1]), 0)
holder, at = buckets.holder("key a", Limits(tokens_per_day=10**9)), moment(0.0, 1_800_000_000.0)
print("attached", flush=True)
passes = 0
while buckets.cells[holder.offset] == 0:  # until control ends the test
    assert buckets.reserve([(holder, Amounts(tokens=1))], at, {}) is None
    passes += 1
    if passes % 50 == 0:
        buckets.tick()
print(passes, flush=True)
"""


def test_nothing_is_lost_while_control_and_the_only_worker_write() -> None:
    with shared(1) as control:
        command = [sys.executable, "-P", "-c", COUNTER, str(control.fd)]
        with subprocess.Popen(command, pass_fds=(control.fd,), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            added, day = 0, moment(0.0, WALL).periods[0]
            for _ in range(20):
                control.announce_writes()
                while not control.may_write:
                    sleep(0)
                holder = control.holder("key a", Limits(tokens_per_day=10**9))
                for _ in range(50):
                    control.add_earlier_use(holder, {("day", day): (1, 0)})
                    added += 1
                control.end_writes()
            control.cells[holder.offset] = 1.0
            passes = int(process.stdout.readline())
        assert control.cells[holder.offset + DAY + USED] == passes + added


def test_rates_are_those_of_the_holder() -> None:
    limits = Limits(requests_per_minute=6, tokens_per_minute=600, concurrent=5)
    with shared(1) as control, closing(Buckets.inherited(os.dup(control.fd), 0)) as worker:
        holder = worker.holder("key a", limits)
        assert worker.reserve([(holder, Amounts(1, 1, 100))], moment(1000.0, WALL), {}) is None
        rates = worker.rates(holder)
        assert (rates.requests_full, rates.tokens_full, rates.in_flight) == (1010.0, 1010.0, 1)
        assert control.shown_rates("key a") == rates
        assert worker.reserve([(holder, Amounts(1, 1, 200))], moment(1000.0, WALL), {}) is None
        rates = worker.rates(holder)
        assert (rates.requests_full, rates.tokens_full, rates.in_flight) == (1020.0, 1030.0, 2)


def test_the_capacity_of_hard_budgets() -> None:
    buckets, at = Buckets.private(), moment(0.0, WALL)
    holder = buckets.holder("key a", Limits(tokens_per_day=1000, cost_per_week=90))
    assert buckets.reserve([(holder, Amounts(1, 1, 400, 30))], at, {}) is None
    left, whole = buckets.hard_capacity([holder], at)
    assert (left, whole) == ((600, 60), (1000, 90))
    other = buckets.holder("team", Limits(cost_per_week=70))
    assert buckets.reserve([(other, Amounts(1, 1, 0, 20))], at, {}) is None
    assert buckets.hard_capacity([holder, other], at) == ((600, 50), (1000, 70)), "the smallest of each kind"
    later = moment(0.0, WALL + 30 * 86400)
    assert buckets.hard_capacity([holder], later)[0] == (1000, 90), "another day and another week"


def test_control_may_write_until_it_announces_it() -> None:
    with shared(1) as control, closing(Buckets.inherited(os.dup(control.fd), 0)):
        assert control.may_write


def test_the_only_worker_waits_for_no_lock_after_the_writes_of_control() -> None:
    with shared(1) as control, closing(Buckets.inherited(os.dup(control.fd), 0)) as worker:
        holder, at = worker.holder("key a", LIMITS), moment(0.0, WALL)
        control.announce_writes()
        worker.tick()
        control.end_writes()
        worker.tick()
        with locked_elsewhere(control):
            assert worker.reserve([(holder, Amounts(tokens=1))], at, {}) is None


def test_closing_closes_the_file() -> None:
    control = Buckets.create("test", 1)
    control.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(control.fd)


def test_a_holder_may_use_the_last_byte_of_the_memory() -> None:
    def memory(size: int) -> mmap.mmap:
        made = mmap.mmap(-1, size)
        struct.pack_into("<QQ", made, 0, 1, 0)
        return made

    def fits(size: int) -> bool:
        try:
            Buckets(memory(size)).holder("key a", LIMITS)
        except BucketsFullError:
            return False
        return True

    sizes = range(64, 4096, 8)
    least = next(size for size in sizes if fits(size))
    buckets = Buckets(memory(least))
    holder = buckets.holder("key a", LIMITS)
    assert holder.offset + SIZE + 1 == len(buckets.cells), "the requests in flight of its worker are in the last cell"


def test_private_counts_have_one_worker() -> None:
    with closing(Buckets.private()) as buckets:
        holder, other = buckets.holder("key a", LIMITS), buckets.holder("key b", LIMITS)
        assert other.offset - holder.offset > SIZE
        assert buckets.reserve([(holder, Amounts(slots=1))], moment(0.0, WALL), {}) is None
        assert (buckets.in_flight(holder), buckets.in_flight(other)) == (1, 0)


def test_a_process_waits_for_the_lock_of_another() -> None:
    with shared(2) as buckets:
        waiting = Thread(target=buckets.holder, args=("key a", LIMITS))
        with locked_elsewhere(buckets):
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive()
        waiting.join()
