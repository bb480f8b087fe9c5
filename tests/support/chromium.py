"""Control a headless Chromium: open a page, evaluate JavaScript, take screenshots, and collect errors.

The test uses the debugging pipe (``--remote-debugging-pipe``): JSON messages that end with a zero byte, on the descriptors 3 and 4
of the browser's process. No process is left at the end.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_OUR_ENDS = 20  # a descriptor that is neither 3 nor 4


class Chromium:
    """One page. ``complaints``: errors of the browser (blocked by policy, failed to load, uncaught). ``requests``: the requested URLs."""

    def __init__(self, to: BinaryIO, source: BinaryIO) -> None:
        self._to = to
        self._from = source
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or None if it has no value yet."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def prefer(self, scheme: str) -> None:
        """Switch to the color scheme ``light`` or ``dark``."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path) -> None:
        """Write an image of the whole page as PNG."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._to.write(json.dumps({"id": number, "method": method, "params": parameters, **self._session}).encode() + b"\0")
        self._to.flush()
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(str(message["params"]["entry"]["text"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(str(message["params"]["request"]["url"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from.fileno(), 1 << 16)
            assert data, "chromium has ended"
            self._rest += data
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Run a browser with its profile in ``folder``. Skip the test if Chromium is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (Debian: chromium)")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    descriptors = [fcntl.fcntl(fd, fcntl.F_DUPFD, _OUR_ENDS) for fd in (theirs_in, theirs_out)]
    # The shell moves the pipes to the descriptors that the browser expects.
    command = [
        "bash",
        "-c",
        f'exec "$@" 3<&{descriptors[0]} 4>&{descriptors[1]}',
        "bash",
        program,
        *FLAGS,
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    ]
    own = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **own},
            pass_fds=descriptors,
            start_new_session=True,
        )
    for fd in (theirs_in, theirs_out, *descriptors):
        os.close(fd)
    try:
        with open(ours_out, "wb") as to, open(ours_in, "rb") as source:
            yield Chromium(to, source)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
