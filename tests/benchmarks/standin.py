"""The stand-in upstreams, and the Redis: what the proxies have behind them.

JSON comes from nginx, with a fixed answer, on as many ports as requested; streams come from `origin.py`. Both stay on the load's core. The
rule: they answer what proxies ask of a server when they start (`/health`, `/v1/models`, …), so that no proxy takes them for down.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import wire
from tests.benchmarks.accounting import LOAD_CORE
from tests.benchmarks.process import accepts, free_ports, running

ROOT = Path(__file__).resolve().parents[2]
_START = 20.0  # seconds

_NGINX = """
daemon off; master_process off; worker_rlimit_nofile 20000; pid nginx.pid; error_log stderr crit;
events {{ worker_connections 20000; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 3600s; client_max_body_size 20m; client_body_buffer_size 2m;
  client_body_temp_path temporary; proxy_temp_path temporary;
  fastcgi_temp_path temporary; uwsgi_temp_path temporary; scgi_temp_path temporary;
  default_type application/json;
  server {{
    {listens}
    location / {{ return 200 '{{}}'; }}
    location = /v1/models {{ return 200 '{models}'; }}
    location = /v1/chat/completions {{ return 200 '{completion}'; }}
    location = /v1/completions {{ default_type text/event-stream; return 200 '{stream}'; }}
  }}
}}
"""


@contextmanager
def json_servers(folder: Path, count: int = 1, models: Sequence[str] = (wire.MODEL,)) -> Iterator[tuple[int, ...]]:
    """So many ports, each of which answers every chat request with the same 750 bytes and every completion with a short stream."""
    folder.mkdir(parents=True)
    ports = free_ports(count)
    text = _NGINX.format(
        listens=" ".join(f"listen 127.0.0.1:{port} backlog=8192;" for port in ports),
        models=wire.models(models).decode(),
        completion=wire.completion().decode(),
        stream=(wire.prompt_event() + wire.DONE).decode().replace("\n", "\\n"),
    )
    (folder / "nginx.conf").write_text(text)
    command = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
    with running(command, folder, (LOAD_CORE,), {}, lambda: accepts(ports[-1]), _START):
        yield ports


@contextmanager
def stream_server(folder: Path, rate: float, count: int = 0) -> Iterator[int]:
    """A port where every request gets a stream of `count` events (0: for ever), `rate` a second (0: as fast as they are read)."""
    folder.mkdir(parents=True)
    [port] = free_ports(1)
    command = [sys.executable, "-m", "tests.benchmarks.origin", str(port), str(rate), str(count)]
    with running(command, folder, (LOAD_CORE,), {"PYTHONPATH": str(ROOT)}, lambda: accepts(port), _START):
        yield port


@contextmanager
def redis(folder: Path) -> Iterator[int]:
    """Run a Redis that stores nothing on disk."""
    folder.mkdir(parents=True)
    [port] = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with running(command, folder, (LOAD_CORE,), {}, lambda: accepts(port), _START):
        yield port
