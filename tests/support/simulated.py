"""Run the simulator in a separate process, as a server that the gateway did not launch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.process import SIMULATOR, stop

_ADDRESS = re.compile(r"Starting vLLM server on http://.*:(\d+)")


@contextmanager
def simulated(model: str, *flags: str) -> Iterator[int]:
    """Serve a model on a loopback port. Yield the port."""
    command = [*SIMULATOR, model, "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        announced = next((found for line in process.stderr if (found := _ADDRESS.search(line))), None)
        assert announced is not None, "the simulator did not start"
        yield int(announced[1])
    finally:
        stop(process)
