"""Full collections run while the process is idle, and rarely otherwise."""

from __future__ import annotations

import gc
import subprocess
import sys

from gateway.system.garbage_collector import FullCollections


class Process:
    """A process whose clock and garbage collector the test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.collected_at: list[float] = []
        self.collections = FullCollections(lambda: self.collected_at.append(self.now), lambda: self.now)

    def seconds(self, count: int, *, idle: bool) -> None:
        for _ in range(count):
            self.now += 1
            gc.collect(1)  # something was allocated
            self.collections.tick(idle=idle)


def test_an_idle_process_is_collected_once_a_minute() -> None:
    process = Process()
    process.seconds(150, idle=True)
    assert process.collected_at == [60, 120]


def test_a_process_that_is_never_idle_is_collected_once_an_hour() -> None:
    process = Process()
    process.seconds(3700, idle=False)
    assert process.collected_at == [3600]
    process.seconds(50, idle=True)
    assert process.collected_at == [3600, 3701], "as soon as it is idle"


def test_nothing_is_collected_where_nothing_was_allocated() -> None:
    process = Process()
    gc.disable()
    try:
        for _ in range(10_000):
            process.now += 1
            process.collections.tick(idle=True)
    finally:
        gc.enable()
    assert process.collected_at == []


def test_waves_of_requests_are_not_examined() -> None:
    """64 requests in flight are some thousand objects, which are released without the collector."""
    program = """
import gc
from gateway.system.garbage_collector import take_over
take_over()
young = gc.get_stats()[0]["collections"]
for _ in range(100):
    objects = [[] for _ in range(3000)]
    del objects
print(gc.get_stats()[0]["collections"] - young)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(printed) == 0


def test_no_full_collection_starts_by_itself() -> None:
    program = """
import gc
from gateway.system.garbage_collector import take_over
take_over()
full = gc.get_stats()[2]["collections"]
objects = [[] for _ in range(300_000)]
print(gc.get_stats()[2]["collections"] - full, gc.get_stats()[1]["collections"] > 10)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "0 True\n"
