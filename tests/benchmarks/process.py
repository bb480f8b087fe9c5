"""Owns the processes of a measurement: what a `with` started, it ends, with every process behind it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.benchmarks.accounting import Tree

_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.05


class DidNotStart(Exception):
    """A program ended at once or never answered; the text has its last words."""


@contextmanager
def running(
    command: Sequence[str], folder: Path, cores: Sequence[int], environ: Mapping[str, str], ready: Callable[[], bool], seconds: float
) -> Iterator[Tree]:
    """Run a program on these cores until the block ends; its output goes to files in `folder`.

    Raises:
        DidNotStart: it is not `ready` within so many seconds.
    """
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    with open(folder / "stdout", "ab") as out, open(folder / "stderr", "ab") as err:
        process = subprocess.Popen(pinned, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **environ}, cwd=folder)
    try:
        _await(process, ready, seconds, folder)
        yield Tree(process.pid)
    finally:
        _end(process)


def _await(process: subprocess.Popen[bytes], ready: Callable[[], bool], seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            output = ((folder / "stderr").read_text(errors="replace") + (folder / "stdout").read_text(errors="replace")).strip()
            raise DidNotStart(f"not ready within {seconds:.0f} s: {output[-600:]}")
        time.sleep(_POLL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the root; whatever is left of the tree is killed."""
    tree = [] if process.poll() is not None else Tree(process.pid).processes()
    process.terminate()
    _, left = psutil.wait_procs(tree, _GRACE)
    for each in left:
        each.kill()
    process.wait()


def free_ports(count: int) -> tuple[int, ...]:
    """Return different ports of the loopback interface that are free now."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(listener.getsockname()[1] for listener in listeners)


def accepts(port: int) -> bool:
    """Return whether a process listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
