"""Fixtures of the tests that launch servers."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upstream.launcher.launching import Case, alive


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with tempfile.TemporaryDirectory(prefix="run-") as runtime:  # a short path: unix sockets allow 107 bytes
        yield Case(tmp_path, Path(runtime))
    left = [int(line.split()[1]) for file in tmp_path.glob("pids-*") for line in file.read_text().splitlines()]
    still_alive = [pid for pid in left if alive(pid)]
    for pid in still_alive:
        os.kill(pid, signal.SIGKILL)
    assert still_alive == []
