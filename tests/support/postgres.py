"""Run a real PostgreSQL in a temporary folder on an ephemeral port, as a user that it accepts (it refuses root)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import psycopg

from tests.support.ports import reserved
from tests.support.process import wait_for

_DIES_WITH_US = ["setpriv", "--pdeathsig", "INT"]  # also when the tests are killed
NOT_INSTALLED = "PostgreSQL is not installed (Debian: postgresql)"


def program(name: str) -> str:
    """Return the path of a PostgreSQL program. Raises AssertionError if it is not installed."""
    found = _program(name)
    assert found is not None, NOT_INSTALLED
    return found


def _program(name: str) -> str | None:
    """Return the path of a server program. Debian does not put them on PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([*map(str, versions), os.environ["PATH"]]))


def installed() -> bool:
    return _program("postgres") is not None and _program("initdb") is not None


def _as_user() -> list[str]:
    """Return the options that switch from root to the user of the package."""
    return ["--reuid", "postgres", "--regid", "postgres", "--clear-groups"] if os.geteuid() == 0 else []


@dataclass
class Postgres:
    """A server that can be stopped and restarted with the same data on the same port."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def database(self, encoding: str = "UTF8") -> str:
        """Create an empty database. Return its URL."""
        name = f"test_{uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE \"{name}\" TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'".encode())
        return self.url(name)

    def start(self) -> None:
        program = _program("postgres")
        assert program is not None
        command = [*_DIES_WITH_US, *_as_user(), program, "-D", str(self.folder / "data"), "-p", str(self.port), "-k", str(self.folder)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "max_connections=50"]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        wait_for(self._accepts, 60, why=lambda: (self.folder / "log").read_text())

    def _accepts(self) -> bool:
        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            assert self.process is not None and self.process.poll() is None, (self.folder / "log").read_text()
            return False
        return True

    def stop(self) -> None:
        """Stop immediately and close all connections (SIGINT is PostgreSQL's fast shutdown)."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self.process = None

    def kill(self) -> None:
        """Kill every process of the server (SIGKILL). Nothing is shut down, and the next start recovers from the log."""
        if self.process is not None:
            whole = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            for each in whole:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            self.process.wait(60)
            psutil.wait_procs(whole, 60)
        self.process = None

    def promote(self) -> None:
        """Make a standby the primary."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote(true, 60)").fetchone() == (True,)


@contextmanager
def standby(primary: Postgres) -> Iterator[Postgres]:
    """Run a standby. The primary commits a transaction when the standby has it (synchronous replication), until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="pg-") as name, reserved() as port:
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        source = f"postgresql://postgres@127.0.0.1:{primary.port}/?application_name=standby"
        command = [*_DIES_WITH_US, *_as_user(), program("pg_basebackup"), "-d", source, "-D", str(folder / "data"), "-R", "--no-sync"]
        subprocess.run([*command, "--checkpoint=fast"], check=True, capture_output=True, cwd="/")
        made = Postgres(folder, port)
        try:
            made.start()
            with psycopg.connect(primary.url("postgres"), autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                connection.execute("SELECT pg_reload_conf()")
                wait_for(lambda: connection.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone(), 60)
            yield made
        finally:
            made.stop()


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a server; no process or file is left at the end."""
    program = _program("initdb")
    assert program is not None, NOT_INSTALLED
    with tempfile.TemporaryDirectory(prefix="pg-") as name, reserved() as port:  # a short path: unix sockets allow 107 bytes
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        command = [
            *_DIES_WITH_US,
            *_as_user(),
            program,
            "-D",
            str(folder / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        subprocess.run(command, check=True, capture_output=True, cwd="/")
        server = Postgres(folder, port)
        try:
            server.start()
            yield server
        finally:
            server.stop()
