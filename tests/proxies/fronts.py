"""The proxies in front of the gateway: how each is configured and started. ``FRONTS`` is the table.

The rules: a proxy has few connections to the gateway and reuses them for all clients, and it forwards as much as it can be configured
to, because what it refuses itself tests nothing here. Half of its connections pass ``sharing.cutting``.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.benchmarks.install import environment, installed
from tests.support.nginx import nginx
from tests.support.process import stop, wait_for

CONNECTIONS = 4
"""Connections to each of the two addresses of the gateway. A worker of nginx may open more, and pools as many."""
_NGINX = """
    upstream servers {{ {servers} keepalive {connections}; }}
    map $http_upgrade $offered {{ default ""; ~. upgrade; }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 20m; client_header_timeout 5s; client_body_timeout 5s; large_client_header_buffers 4 64k;
        ignore_invalid_headers off; underscores_in_headers on; merge_slashes off;
        location / {{
            proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $offered;
            proxy_request_buffering off; proxy_buffering off; proxy_next_upstream off;
        }}
    }}
"""
_HAPROXY = """
global
    nbthread 1
    maxconn 2000
    tune.sndbuf.server 4608
defaults
    mode http
    timeout connect 5s
    timeout client 10s
    timeout server 30s
    timeout http-request 5s
    http-reuse always
    option accept-invalid-http-request
frontend clients
    bind 127.0.0.1:{port}
    default_backend gateway
backend gateway
    balance roundrobin
{servers}
"""


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy. ``run`` starts it in front of ports, with TLS to them or not, and yields its port."""

    name: str
    version: Callable[[], str]
    missing: Callable[[], str | None]
    """Returns why it cannot run, None if it can."""
    run: Callable[[Sequence[int], bool], AbstractContextManager[int]]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _nginx(to: Sequence[int], tls: bool) -> Iterator[int]:
    port = _free_port()
    servers = " ".join(f"server 127.0.0.1:{each} max_fails=0;" for each in to)
    site = _NGINX.format(servers=servers, connections=CONNECTIONS * len(to), port=port)
    with nginx(site.replace("http://servers", "https://servers") if tls else site, port):
        yield port


@contextmanager
def _haproxy(to: Sequence[int], tls: bool) -> Iterator[int]:
    port, options = _free_port(), f"maxconn {CONNECTIONS}" + (" ssl verify none" if tls else "")
    servers = "\n".join(f"    server s{each} 127.0.0.1:{each} {options}" for each in to)
    with _running("haproxy.cfg", _HAPROXY.format(port=port, servers=servers), [shutil.which("haproxy") or "", "-f"], port):
        yield port


@contextmanager
def _envoy(to: Sequence[int], tls: bool) -> Iterator[int]:
    assert not tls
    port = _free_port()
    command = [
        str(environment("envoy") / "bin" / "envoy"),
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "--log-level",
        "off",
        "--config-path",
    ]
    with _running("envoy.json", json.dumps(_envoy_configuration(port, to)), command, port):
        yield port


def _envoy_configuration(port: int, to: Sequence[int]) -> dict[str, Any]:
    types = "type.googleapis.com/envoy.extensions"
    limits = {"max_connections": CONNECTIONS * len(to), "max_pending_requests": 2000, "max_requests": 2000, "max_retries": 0}
    router = {"name": "router", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}}
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "data",
        "stream_idle_timeout": "10s",
        "request_headers_timeout": "5s",
        "http_protocol_options": {"accept_http_10": True, "allow_chunked_length": True},
        "upgrade_configs": [{"upgrade_type": "websocket"}, {"upgrade_type": "h2c"}],
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "gateway", "timeout": "0s"}}]}
            ]
        },
        "http_filters": [router],
    }
    cluster = {
        "name": "gateway",
        "type": "STATIC",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {
            "cluster_name": "gateway",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(each)}} for each in to]}],
        },
    }
    listener = {"name": "data", "address": _address(port), "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextmanager
def _running(name: str, configuration: str, command: Sequence[str], port: int) -> Iterator[None]:
    """Run a program with a configuration file until the block ends."""
    with tempfile.TemporaryDirectory(prefix="front-") as folder:
        file, log = Path(folder) / name, Path(folder) / "log"
        file.write_text(configuration)
        with open(log, "wb") as output:
            line = ["setpriv", "--pdeathsig", "TERM", *command, str(file)]
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            wait_for(lambda: process.poll() is not None or _listens(port), why=log.read_text)
            assert process.poll() is None, log.read_text()
            yield
        finally:
            stop(process)


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _printed_version(program: str) -> str:
    result = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
    found = re.search(r"[/ ](\d+\.\d+\.\d+)", result.stdout + result.stderr)
    return found[1] if found else "unknown"


def _of_debian(program: str) -> str | None:
    return None if shutil.which(program) else f"not installed (Debian: {program})"


def _envoy_version() -> str:
    program = environment("envoy") / "bin" / "envoy"
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"/(\d+\.\d+\.\d+)", result.stdout)
    return found[1] if found else "unknown"


def _debian(name: str, run: Callable[[Sequence[int], bool], AbstractContextManager[int]]) -> Front:
    return Front(name, partial(_printed_version, name), partial(_of_debian, name), run)


FRONTS: Mapping[str, Front] = MappingProxyType(
    {
        front.name: front
        for front in (
            _debian("nginx", _nginx),
            _debian("haproxy", _haproxy),
            Front("envoy", _envoy_version, lambda: None if installed("envoy") else "not installed: make bench-peers", _envoy),
        )
    }
)
