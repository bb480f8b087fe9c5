"""A model's launch settings turned into the words and the environment of one ``vllm serve``.

Owns what the gateway insists on (the served names, the place to listen, the internal key, the GPUs) and what
it refuses to be told twice. Pure: nothing is started, no file is touched. The rule: a secret is in the
environment, never among the words and never in a repr.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from upstream.http.address import Address

ArgumentValue = str | int | float | bool | Sequence["ArgumentValue"] | Mapping[str, "ArgumentValue"]

REFUSED_ARGS = {
    "api-key": "the gateway gives every launched server a key of its own",
    "model": "name it as launch.model",
    "served-model-name": "the gateway sets it from the model's id, so that answers carry that id",
    "ssl-keyfile": "a launched server listens on this machine only; the gateway's own port speaks TLS",
    "ssl-certfile": "a launched server listens on this machine only; the gateway's own port speaks TLS",
}
REFUSED_ENV = {"VLLM_API_KEY": REFUSED_ARGS["api-key"]}

ENV_DEFAULTS = {
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
ADAPTERS_AT_ONCE = 8
"""Adapters that may share a batch unless the operator says otherwise: vLLM sets GPU memory aside for each."""

RPC_FOLDER = "VLLM_RPC_BASE_PATH"
"""Where vLLM's processes put the sockets between them (vllm/envs.py). It takes none of them away.

Not TMPDIR: the locks that let only one of several servers download a model are there.
"""
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to connect when the operator binds them all


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the ``name`` that it is served under, and where it is loaded from."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How one replica of a model is started, as the operator wrote it.

    ``served_names``: the first is the model's id. ``args``: flag without dashes -> value; ``true`` is a bare
    ``--flag``, ``false`` is ``--no-flag``, a list follows its one flag, a mapping becomes JSON. ``env`` is set over
    the inherited environment. ``listen``: ``tcp`` for a command that knows no ``--uds``. ``sleeps``: it can be put to sleep.
    ``drain``: seconds that vLLM itself gives what is in flight, where something else than the gateway tells it to end. ``adapters`` are
    served beside the model.
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


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The words to execute and the variables to set over the inherited environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)


def problems(settings: LaunchSettings) -> tuple[str, ...]:
    """Everything about the settings that cannot work, in words for the operator, each beginning with its place (``args.api-key: …``)."""
    return tuple(_problems(settings, _by_flag(settings.args)))


def address_for(settings: LaunchSettings, *, uds: str, free_port: Callable[[], int]) -> Address:
    """Where the server will listen, and the gateway will find it.

    What the operator wrote wins: ``uds`` in args is that socket; ``host`` or ``port`` in args mean tcp. Otherwise
    ``listen`` decides between the private socket ``uds`` and a loopback port from ``free_port``.
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


def knows_no_uds(log_tail: str) -> bool:
    """Whether a command that ended at once said that it has no option ``--uds`` (argparse's words, click's and others')."""
    return _NO_UDS.search(log_tail) is not None


def inherited(environ: Mapping[str, str], beside: Path) -> dict[str, str]:
    """The environment that a server's own variables are set over; commands in ``beside`` are found without being on PATH."""
    return {**environ, "PATH": f"{environ.get('PATH', os.defpath)}{os.pathsep}{beside}"}


def command_line(settings: LaunchSettings, listen: Address, api_key: str) -> CommandLine:
    """The words and the environment that start the server on ``listen`` (from ``address_for``) with ``api_key``.

    Raises ValueError with every line of ``problems(settings)`` when there are any.
    """
    if wrong := problems(settings):
        raise ValueError("; ".join(wrong))
    place: dict[str, ArgumentValue] = {"uds": listen.uds} if listen.uds else {"host": listen.host, "port": listen.port}
    own = {"served-model-name": list(settings.served_names)} | place | _adapter_flags(settings) | _wanted_flags(settings)
    flags = own | _by_flag(settings.args)
    words = [word for flag, value in flags.items() for word in _words(flag, value)]
    return CommandLine((*settings.command, settings.model, *words), _environment(settings, api_key))


def takes_vllms_flags(command: Sequence[str]) -> bool:
    """Whether a command starts vLLM, or the simulator that knows its flags; with or without something before it."""
    return any(PurePath(word).name in ("vllm", "simulate", "upstream.simulator") or word.startswith("vllm.") for word in command)


def _wanted_flags(settings: LaunchSettings) -> dict[str, ArgumentValue]:
    """What the gateway asks for, unless the operator has written another value."""
    sleep: dict[str, ArgumentValue] = {"enable-sleep-mode": True} if settings.sleeps else {}
    drain: dict[str, ArgumentValue] = (
        {"shutdown-timeout": math.ceil(settings.drain)} if settings.drain and takes_vllms_flags(settings.command) else {}
    )
    return sleep | drain


def _problems(settings: LaunchSettings, args: Mapping[str, ArgumentValue]) -> Iterator[str]:
    if not settings.command:
        yield "command: it is empty"
    if not settings.served_names:
        yield "served_names: the server needs at least one name"
    if len(args) < len(settings.args):
        yield "args: a flag is there twice, once with dashes and once with underscores"
    if "uds" in args and ("host" in args or "port" in args):
        yield "args.uds: excludes host and port"
    if "port" in args and not _is_port(args["port"]):
        yield "args.port: a port is a number from 1 to 65535"
    yield from (f"args.{flag}: {why}" for flag, why in REFUSED_ARGS.items() if flag in args)
    if settings.adapters:
        yield from (f"args.{flag}: loras says it already" for flag in ("enable-lora", "lora-modules") if flag in args)
    yield from (f"args.{flag}: the list is empty" for flag, value in args.items() if isinstance(value, list | tuple) and not value)
    if settings.sleeps and args.get("enable-sleep-mode") is False:
        yield "args.enable-sleep-mode: idle_sleep needs it"
    yield from (f"env.{name}: {why}" for name, why in REFUSED_ENV.items() if name in settings.env)
    if settings.gpus and "CUDA_VISIBLE_DEVICES" in settings.env:
        yield "env.CUDA_VISIBLE_DEVICES: gpus says it already"


def _adapter_flags(settings: LaunchSettings) -> dict[str, ArgumentValue]:
    """What vLLM needs to serve the adapters (vllm/entrypoints/launchers/cli_args.py, vllm/config/lora.py).

    Its own defaults keep one adapter at a time: requests for two would take turns, each reading its adapter from disk.
    """
    adapters = settings.adapters
    if not adapters:
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
    """``max_model_len`` -> ``max-model-len``; what follows a dot names a field of a JSON argument and keeps its form."""
    head, dot, rest = key.removeprefix("--").partition(".")
    return head.replace("_", "-") + dot + rest


def _words(flag: str, value: ArgumentValue) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(_word, value)]
    word = _word(value)
    # argparse takes a separate word with a leading dash for the next flag; everything else stays two words, as --config needs.
    return [f"--{flag}={word}"] if word.startswith("-") else [f"--{flag}", word]


def _word(value: ArgumentValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=dict)


def _environment(settings: LaunchSettings, api_key: str) -> dict[str, str]:
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, settings.gpus))} if settings.gpus else {}
    sleep = {"VLLM_SERVER_DEV_MODE": "1"} if settings.sleeps else {}  # opens /sleep and /wake_up
    return ENV_DEFAULTS | gpus | sleep | dict(settings.env) | {"VLLM_API_KEY": api_key}
