"""The cost of a process tree, counted on real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.benchmarks.accounting import Tree, cost, share_of_others

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
PARENT = f"""
import subprocess, sys
for line in sys.stdin:
    subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
    print("done", flush=True)
"""


@contextmanager
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process that, for each line, has a child use 0.3 s of CPU."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.communicate()


def send_request(process: subprocess.Popen[str]) -> None:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_a_child_that_has_ended_counts() -> None:
    with parent() as process:
        with cost(Tree(process.pid)) as spent:
            send_request(process)
        assert spent.proxy >= 0.25


def test_what_was_before_does_not_count() -> None:
    with parent() as process:
        send_request(process)
        with cost(Tree(process.pid)) as spent:
            pass
        assert spent.proxy < 0.25


def test_the_memory_of_a_tree_is_that_of_its_processes() -> None:
    with parent() as process:
        tree = Tree(process.pid)
        assert [each.pid for each in tree.processes()] == [process.pid]
        assert tree.rss() > 1_000_000


def test_nothing_costs_nothing() -> None:
    assert (Tree(None).cpu(), Tree(None).rss(), Tree(None).processes()) == (0.0, 0, [])


def test_others_took_what_was_neither_idle_nor_ours() -> None:
    assert share_of_others(10.0, 4.0, 1.0) == 0.5
    assert share_of_others(10.0, 4.0, 6.5) == 0.0  # the two clocks differ by a little
    assert share_of_others(0.0, 0.0, 0.0) == 0.0
