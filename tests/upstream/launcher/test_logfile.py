"""The end of a server's log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from upstream.launcher.logfile import TAIL_BYTES, TAIL_LINES, LogFile


@pytest.mark.parametrize("probes", [0, 5, 10 * TAIL_BYTES // 60])
def test_the_end_of_a_log_has_no_probes_of_the_gateway(tmp_path: Path, probes: int) -> None:
    log = LogFile(tmp_path, "m#0")
    request = 'INFO:     10.0.0.5:1 - "GET /v1/models HTTP/1.1" 401 Unauthorized'
    with log.appending() as fd:
        os.write(fd, "".join(f"line {number}\n" for number in range(2 * TAIL_LINES)).encode() + f"{request}\n".encode())
        for path in ("/health", "/metrics"):
            os.write(fd, f'(APIServer pid=7) INFO:      - "GET {path} HTTP/1.1" 200 OK\n'.encode() * probes)
    assert log.tail().splitlines() == [*(f"line {number}" for number in range(TAIL_LINES + 1, 2 * TAIL_LINES)), request]
