"""A real server with S3's API: moto's, as a separate process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2

from tests.deploy.install import tool
from tests.support.process import stop

NOT_INSTALLED = "needs moto's server (make deploy-tools)"
BUCKET = "records"
CREDENTIALS = ("an-access-key", "a-secret-of-s3")


@contextmanager
def s3_server(port: int) -> Iterator[str]:
    """Run a server with an empty bucket on a reserved port, and yield the bucket's URL."""
    program = tool("s3")
    assert program is not None, "the caller has skipped"
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(httpx2.HTTPError):
                httpx2.put(f"{url}/{BUCKET}", timeout=30).raise_for_status()
                break
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        yield f"{url}/{BUCKET}"
    finally:
        stop(process)
