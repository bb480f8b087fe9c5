"""Run a real Redis, or a Sentinel, on a separate port and in a temporary folder. A test can stop, freeze and restart it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.snapshot.snapshot import LimitsStore
from tests.support.ports import reserved
from tests.support.process import wait_for


@dataclass
class RedisServer:
    """A server that loses all data when it is restarted. ``options`` are of redis-server."""

    port: int
    folder: Path
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    def store_config(self, **more: Any) -> LimitsStore:
        """Return a configuration with this server's address and a timeout that suits a busy machine. ``more``: further fields."""
        return store_at(self.port, **{"timeout": 30.0, **more})

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed (Debian: redis-server)")
        command = [program, *self.options, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(self.folder)]
        command += ["--unixsocket", str(self.socket_path)]
        user = _user()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, user=user, extra_groups=[] if user is not None else None)
        wait_for(self._accepts)

    def _accepts(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Freeze the server (SIGSTOP) or resume it (SIGCONT)."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None


def _user() -> int | None:
    """Return the ID of an unprivileged user if the tests run as root."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def store_at(port: int, **more: Any) -> LimitsStore:
    """Return the configuration of a store at a port of the loopback interface. ``more``: further fields."""
    return LimitsStore((("127.0.0.1", port),), **more)


@contextmanager
def redis_server(options: Callable[[Path], Sequence[str]] = lambda _: ()) -> Iterator[RedisServer]:
    """Run a server. ``options`` may write files into the server's folder and returns options of redis-server."""
    with tempfile.TemporaryDirectory(prefix="redis-") as name, reserved() as port:
        folder = Path(name)
        folder.chmod(0o777)
        server = RedisServer(port, folder, options(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()


def counted(client: redis.Redis) -> list[bytes]:
    """Return the names of what is counted in a server. The gateway's hash about the store itself is not."""
    return sorted(name for name in client.scan_iter() if name != b"vllm-gateway:store")


@pytest.fixture(scope="module")
def redis_of_module() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(redis_of_module: RedisServer) -> RedisServer:
    """Return the module's server, emptied."""
    with redis_of_module.client() as each:
        each.flushall()
    return redis_of_module
