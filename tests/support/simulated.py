"""The simulator as a server that runs already, in a process of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.process import SIMULATOR

_ADDRESS = re.compile(r"Starting vLLM server on http://.*:(\d+)")


@contextmanager
def simulated(model: str, *flags: str) -> Iterator[int]:
    """One that serves a model on a loopback port, which is given."""
    words = [*SIMULATOR, model, "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = next((found for line in process.stderr if (found := _ADDRESS.search(line))), None)
        assert said is not None, "the simulator did not start"
        yield int(said[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
