"""Turns a model's launch settings into the arguments and the environment of one ``vllm serve``.

Owns the options that the gateway sets itself (served names, address, internal key, GPUs) and those that it rejects. Pure: no process is
started and no file is read. The rule: a secret is in the environment, never in the arguments and never in a repr.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from upstream.http.address import Address

ArgumentValue = str | int | float | bool | Sequence["ArgumentValue"] | Mapping[str, "ArgumentValue"]

REFUSED_ARGS = {
    "api-key": "the gateway gives every launched server its own key",
    "model": "name it as launch.model",
    "served-model-name": "the gateway sets it from the model's id, so that answers carry that id",
    "ssl-keyfile": "a launched server listens on this machine only; the gateway's own port speaks TLS",
    "ssl-certfile": "a launched server listens on this machine only; the gateway's own port speaks TLS",
}
REFUSED_ENV = {"VLLM_API_KEY": REFUSED_ARGS["api-key"]}

ENV_DEFAULTS = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ADAPTERS_AT_ONCE = 8
"""Adapters that may share a batch, by default: vLLM reserves GPU memory for each of them."""

_EVENTS = "kv-events-config"
EVENT_BUFFER = 50_000
"""Batches of KV cache events that a server keeps for a gateway that connects later. vLLM's default is 10,000: minutes under load."""

RPC_FOLDER = "VLLM_RPC_BASE_PATH"
"""The folder of the sockets between vLLM's processes (vllm/envs.py). vLLM does not remove them.

Not TMPDIR: it has the locks that let only one of several servers download a model.
"""
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to connect when the operator binds them all


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the ``name`` under which it is served, and the path of its files."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The launch settings of one replica, as the operator wrote them.

    ``served_names``: the first name is the model's ID. ``args``: flag without dashes -> value. ``true`` is a bare ``--flag``, ``false`` is
    ``--no-flag``, a list follows its one flag, a mapping becomes JSON. ``env`` overrides the inherited environment. ``listen``: ``tcp`` for
    a command without ``--uds``. ``sleeps``: the server can be put to sleep. ``drain``: seconds that vLLM itself gives its requests in
    flight when something other than the gateway stops it. ``adapters`` are served in addition to the model. ``cached_tokens``: the
    server reports the cached tokens of each prompt. ``kv_events``: it publishes the events of its prefix cache. ``scale_out``: it serves
    the routes that continue a chat from its token IDs.
    """

    model: str
    served_names: tuple[str, ...]
    command: tuple[str, ...] = ("vllm", "serve")
    args: Mapping[str, ArgumentValue] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    gpus: tuple[int | str, ...] = ()
    listen: Literal["uds", "tcp"] = "uds"
    adapters: tuple[Adapter, ...] = ()
    sleeps: bool = False
    drain: float = 0.0
    cached_tokens: bool = False
    kv_events: bool = False
    scale_out: bool = False


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments to execute, and the variables that override the inherited environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)


def problems(settings: LaunchSettings) -> tuple[str, ...]:
    """Return every problem of the settings, as text for the operator that starts with the path (``args.api-key: …``)."""
    args = _by_flag(settings.args)
    checks = (
        (not settings.command, "command: it is empty"),
        (not settings.served_names, "served_names: the server needs at least one name"),
        (len(args) < len(settings.args), "args: a flag is there twice, once with dashes and once with underscores"),
        ("uds" in args and ("host" in args or "port" in args), "args.uds: excludes host and port"),
        ("port" in args and not _is_port(args["port"]), "args.port: a port is a number from 1 to 65535"),
        *((flag in args, f"args.{flag}: {why}") for flag, why in REFUSED_ARGS.items()),
        *((settings.adapters and flag in args, f"args.{flag}: loras says it already") for flag in ("enable-lora", "lora-modules")),
        *((isinstance(value, list | tuple) and not value, f"args.{flag}: the list is empty") for flag, value in args.items()),
        (settings.sleeps and args.get("enable-sleep-mode") is False, "args.enable-sleep-mode: idle_sleep needs it"),
        *((name in settings.env, f"env.{name}: {why}") for name, why in REFUSED_ENV.items()),
        (settings.gpus and "CUDA_VISIBLE_DEVICES" in settings.env, "env.CUDA_VISIBLE_DEVICES: gpus says it already"),
    )
    return tuple(problem for is_wrong, problem in checks if is_wrong)


def address_for(settings: LaunchSettings, *, uds: str, free_port: Callable[[], int]) -> Address:
    """Return the address on which the server will listen.

    The operator's options take precedence: ``uds`` in args is the socket; ``host`` or ``port`` in args mean TCP. Otherwise ``listen``
    decides between the private socket ``uds`` and a loopback port from ``free_port``.
    """
    args = _by_flag(settings.args)
    if "uds" in args:
        return Address(host="localhost", uds=str(args["uds"]))
    if "host" not in args and "port" not in args and settings.listen == "uds":
        return Address(host="localhost", uds=uds)
    host = str(args.get("host", "127.0.0.1"))
    port = args.get("port")
    return Address(host=EVERY_INTERFACE.get(host, host), port=int(str(port)) if port is not None else free_port())


_NO_UDS = re.compile(r"(?:unrecogni[sz]ed|unknown|unexpected|no such|invalid)[^\n]{0,80}--uds\b", re.IGNORECASE)


def lacks_uds_option(log_tail: str) -> bool:
    """Return whether a command reported that it has no option ``--uds`` (messages of argparse, click and others)."""
    return _NO_UDS.search(log_tail) is not None


def inherited(environ: Mapping[str, str], beside: Path) -> dict[str, str]:
    """Return the inherited environment, in which commands of the folder ``beside`` can be found too."""
    return {**environ, "PATH": f"{environ.get('PATH', os.defpath)}{os.pathsep}{beside}"}


def command_line(settings: LaunchSettings, listen: Address, api_key: str, folder: str | None = None) -> CommandLine:
    """Return the arguments and the environment that start the server on ``listen`` (from ``address_for``) with ``api_key``.

    ``folder``: a private folder for the sockets of its KV cache events; None: it publishes none. Raises ValueError with
    the lines of ``problems(settings)``.
    """
    if found := problems(settings):
        raise ValueError("; ".join(found))
    address: dict[str, ArgumentValue] = {"uds": listen.uds} if listen.uds else {"host": listen.host, "port": listen.port}
    own = {"served-model-name": list(settings.served_names)} | address | _adapter_flags(settings) | _default_flags(settings)
    if folder is not None:
        own |= _event_flags(settings, folder)
    arguments = [argument for flag, value in (own | _by_flag(settings.args)).items() for argument in _arguments(flag, value)]
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, settings.gpus))} if settings.gpus else {}
    sleep = {"VLLM_SERVER_DEV_MODE": "1"} if settings.sleeps else {}  # opens /sleep and /wake_up
    env = ENV_DEFAULTS | gpus | sleep | dict(settings.env) | {"VLLM_API_KEY": api_key}
    return CommandLine((*settings.command, settings.model, *arguments), env)


def takes_vllms_flags(command: Sequence[str]) -> bool:
    """Return whether a command starts vLLM, or the simulator, which knows its flags; a wrapper may precede it."""
    return any(PurePath(part).name in ("vllm", "simulate", "upstream.simulator") or part.startswith("vllm.") for part in command)


def _default_flags(settings: LaunchSettings) -> dict[str, ArgumentValue]:
    """Return the flags that the gateway sets unless the operator has written another value."""
    is_known = takes_vllms_flags(settings.command)
    wanted: dict[str, ArgumentValue] = {
        "enable-sleep-mode": settings.sleeps,
        "shutdown-timeout": is_known and math.ceil(settings.drain),
        "enable-prompt-tokens-details": is_known and settings.cached_tokens,
        "enable-scale-out": is_known and settings.scale_out,
    }
    return {flag: value for flag, value in wanted.items() if value}


def _event_flags(settings: LaunchSettings, folder: str) -> dict[str, ArgumentValue]:
    """Return the flag for the events of the prefix cache (vllm/distributed/kv_events.py), unless the operator has set it.

    With data parallelism, vLLM accepts a unix socket only if its path contains ``inproc``. It then appends the rank.
    """
    is_set = any(flag.partition(".")[0] == _EVENTS for flag in _by_flag(settings.args))
    if is_set or not settings.kv_events or not takes_vllms_flags(settings.command):
        return {}
    events: dict[str, ArgumentValue] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/inproc-kv",
        "replay_endpoint": f"ipc://{folder}/inproc-kv-replay",
        "buffer_steps": EVENT_BUFFER,
    }
    return {_EVENTS: events}


def _adapter_flags(settings: LaunchSettings) -> dict[str, ArgumentValue]:
    """Return the flags for the adapters (vllm/entrypoints/launchers/cli_args.py, vllm/config/lora.py).

    vLLM's defaults load one adapter at a time: requests for two adapters would alternate, each time reading an adapter from disk.
    """
    if not (adapters := settings.adapters):
        return {}
    modules = [{"name": each.name, "path": each.path, "base_model_name": settings.served_names[0]} for each in adapters]
    flags: dict[str, ArgumentValue] = {"enable-lora": True, "lora-modules": modules}
    if len(adapters) > 1 and not {"max-loras", "max-cpu-loras"} & _by_flag(settings.args).keys():
        flags |= {"max-loras": min(len(adapters), ADAPTERS_AT_ONCE), "max-cpu-loras": len(adapters)}
    return flags


def _is_port(value: ArgumentValue) -> bool:
    return not isinstance(value, bool) and str(value).isdecimal() and 0 < int(str(value)) < 65536


def _by_flag(args: Mapping[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    return {flag_of(key): value for key, value in args.items()}


def flag_of(key: str) -> str:
    """Return the flag of an option: ``max_model_len`` -> ``max-model-len``. After a dot, the field of a JSON argument is unchanged."""
    flag, dot, rest = key.removeprefix("--").partition(".")
    return flag.replace("_", "-") + dot + rest


def _arguments(flag: str, value: ArgumentValue) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(_text, value)]
    text = _text(value)
    # argparse reads a separate argument with a leading dash as the next flag. Other values are separate arguments, as --config needs.
    return [f"--{flag}={text}"] if text.startswith("-") else [f"--{flag}", text]


def _text(value: ArgumentValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=dict)
