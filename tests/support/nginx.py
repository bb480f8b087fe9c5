"""Run a real nginx in a temporary folder with a test's configuration."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.process import wait_for

_MAIN = """\
daemon off;
pid {folder}/pid;
error_log {folder}/error.log info;
worker_processes 1;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{site}
}}
"""
_DIES_WITH_US = ["setpriv", "--pdeathsig", "TERM"]  # also when the tests are killed


@contextmanager
def nginx(site: str, port: int) -> Iterator[Path]:
    """Run nginx with ``site`` in its ``http`` block, on a loopback port. Yield the path of its error log."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("nginx is not installed (Debian: nginx)")
    with tempfile.TemporaryDirectory(prefix="nginx-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # if the tests run as root, nginx's workers run as another user
        (folder / "nginx.conf").write_text(_MAIN.format(folder=folder, site=site))
        command = [*_DIES_WITH_US, program, "-p", name, "-e", f"{name}/error.log", "-c", f"{name}/nginx.conf"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: process.poll() is not None or _listens(port), why=(folder / "error.log").read_text)
            assert process.poll() is None, (folder / "error.log").read_text()
            yield folder / "error.log"
        finally:
            process.terminate()
            process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
