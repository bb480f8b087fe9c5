"""The command line: vLLM's own flags and the simulator's, read into one frozen value.

Owns the parsing. vLLM's flags are accepted from its own table (``vllm_names``); the flags with an effect here are in ``_MEANT``, the others
are ignored. A flag that vLLM does not have fails with argparse's words, status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, get_args, get_type_hints

import yaml

from upstream.simulator.behavior import Behavior, setting
from upstream.simulator.engine.batch import BatchLimits, StepTime
from upstream.simulator.engine.prefix_cache import BLOCK_SIZE, BLOCKS
from upstream.vllm import known_names

DEFAULT_MODEL: Final = "Qwen/Qwen3-0.6B"
DEFAULT_CONTEXT: Final = 40960

_LORA_NEEDS: Final = {"name", "path"}
_LORA_FIELDS: Final = _LORA_NEEDS | {"base_model_name", "is_3d_lora_weight"}
_SIZES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class BadArguments(Exception):
    """Arguments that vLLM parses and then rejects with status 1. The text is vLLM's."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter that is served under a separate name. ``base``: the name of its model, empty for the first model."""

    name: str
    path: str
    base: str = ""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Settings for the start and the end of the process: seconds, and counts over all requests."""

    listen_after: float = setting(0.0, "seconds during which connections are refused")
    healthy_after: float = setting(0.0, "seconds during which /health is 503")
    sick_while: str = setting("", "while there is a file of this name, /health is 503, as after the engine's death")
    failure: bool = setting(False, "fail to start, with status 1")
    die_after_tokens: int | None = setting(None, "exit after this many tokens of all requests")
    die_after_requests: int | None = setting(None, "exit after this many answers")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings from the command line and the environment."""

    model: str
    served: tuple[str, ...]
    host: str
    port: int
    uds: str | None
    api_keys: tuple[str, ...]
    max_model_len: int
    reasoning_parser: str | None
    tool_parser: str | None
    auto_tools: bool
    scale_out: bool
    prompt_tokens_details: bool
    force_include_usage: bool
    request_id_headers: bool
    trust_chat_template: bool
    thinks_by_default: bool
    loras: tuple[Lora, ...]
    sleeps: bool
    shutdown_timeout: float
    keep_alive: float
    block_size: int
    num_gpu_blocks: int
    batch_limits: BatchLimits
    scheduling_policy: str
    step_time: StepTime | None
    seed: int
    start: StartOptions
    behavior: Behavior


def parse(argv: Sequence[str], environ: Mapping[str, str], command: str = "vllm serve") -> Settings:
    """Read the arguments after ``vllm serve``. ``command`` is what ``--help`` calls the program; errors are vLLM's own.

    Raises SystemExit(2) like argparse for an unknown flag, and BadArguments for flags that vLLM parses and then rejects.
    """
    given = _parser(command).parse_args(_normalized(_with_config_file(argv)))
    _check_parsers(given)
    model = given.model_tag or given.model or DEFAULT_MODEL
    keys = tuple(given.api_key or ([environ["VLLM_API_KEY"]] if environ.get("VLLM_API_KEY") else []))
    template_defaults = json.loads(given.default_chat_template_kwargs or "{}")
    return Settings(
        model=model,
        served=tuple(given.served_model_name or [model]),
        host=given.host or "",
        port=int(given.port or 8000),
        uds=given.uds,
        api_keys=keys,
        max_model_len=_size("max-model-len", given.max_model_len, DEFAULT_CONTEXT),
        reasoning_parser=given.reasoning_parser or None,
        tool_parser=given.tool_call_parser,
        auto_tools=bool(given.enable_auto_tool_choice),
        scale_out=bool(given.enable_scale_out),
        prompt_tokens_details=bool(given.enable_prompt_tokens_details),
        force_include_usage=bool(given.enable_force_include_usage),
        request_id_headers=bool(given.enable_request_id_headers),
        trust_chat_template=bool(given.trust_request_chat_template),
        thinks_by_default=template_defaults.get("enable_thinking", True) is not False,
        loras=_loras(given),
        sleeps=bool(given.enable_sleep_mode) and environ.get("VLLM_SERVER_DEV_MODE") == "1",
        shutdown_timeout=float(given.shutdown_timeout or 0),
        keep_alive=float(environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")),
        block_size=int(given.block_size or BLOCK_SIZE),
        num_gpu_blocks=int(given.num_gpu_blocks_override or BLOCKS),
        batch_limits=BatchLimits(
            _size("max-num-batched-tokens", given.max_num_batched_tokens, BatchLimits().tokens),
            int(given.max_num_seqs or BatchLimits().sequences),
        ),
        scheduling_policy=given.scheduling_policy or "fcfs",
        step_time=given.sim_step_time,
        seed=given.sim_seed,
        start=_collected(StartOptions, given),
        behavior=_collected(Behavior, given),
    )


class _Parser(argparse.ArgumentParser):
    """A parser that writes vLLM's messages, with the program name that users typed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser(command: str = "vllm serve") -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm serve", allow_abbrev=False, description="A stand-in for `vllm serve`.", usage=f"{command} [MODEL] [flags]")
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the model's name; it is served under it unless --served-model-name says otherwise"
    )
    accepted = parser.add_argument_group("vLLM's own flags, all accepted; those that have no meaning here are left aside")
    for names, options in _VLLM_FORMS:
        for name in sorted(names):
            shorts = [short for short, long in known_names.SHORT.items() if long == name]
            accepted.add_argument(f"--{name}", *shorts, **options, help=argparse.SUPPRESS)
    own = parser.add_argument_group("the simulator's settings")
    own.add_argument("--sim-seed", type=int, default=0, help="what the text is drawn from, with the request")
    own.add_argument(
        "--sim-step-time",
        type=_step_time,
        metavar="BASE,PER_SEQUENCE,PER_PREFILL_TOKEN",
        help="compute in steps like vLLM, instead of at a fixed speed: seconds of a step, more for each request in it, and more for each "
        "prompt token; --max-num-batched-tokens and --max-num-seqs limit a step, and --scheduling-policy orders the queue",
    )
    for kind in (StartOptions, Behavior):
        _add_settings(own, kind)
    return parser


_VLLM_FORMS: Final[tuple[tuple[frozenset[str], dict[str, Any]], ...]] = (
    (known_names.VALUES - {"scheduling-policy"}, {}),
    (frozenset({"scheduling-policy"}), {"choices": ("fcfs", "priority")}),
    (known_names.LISTS, {"nargs": "+"}),
    (known_names.OPTIONAL, {"nargs": "?"}),
    (known_names.BOOLEANS, {"action": argparse.BooleanOptionalAction}),
    (known_names.SWITCHES, {"action": "store_true"}),
)


def _add_settings(group: argparse._ArgumentGroup, kind: type[Any]) -> None:
    """Add a flag for each field, by its type, with the field's help."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        simple = next(part for part in get_args(hint) if part is not type(None)) if isinstance(hint, types.UnionType) else hint
        form: dict[str, Any] = {"action": "store_true"} if simple is bool else {"type": simple}
        group.add_argument(f"--sim-{field.name.replace('_', '-')}", default=field.default, help=field.metadata.get("help"), **form)


def _collected(kind: type[Any], given: argparse.Namespace) -> Any:
    return kind(**{field.name: getattr(given, f"sim_{field.name}") for field in dataclasses.fields(kind)})


def _normalized(argv: Sequence[str]) -> list[str]:
    """Underscores as dashes, ``-O3`` aside, and ``--some-config.key value`` as ``--some-config value`` (vLLM's forms)."""
    return [_normal_flag(argument) for argument in argv if not re.fullmatch(r"-O[0-3]", argument)]


def _normal_flag(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.split(".")[0].rstrip("+").replace("_", "-") + equals + value


def _with_config_file(argv: Sequence[str]) -> list[str]:
    """Return the flags of ``--config FILE`` (YAML), then the flags of the command line, which take precedence."""
    arguments = list(argv)
    if "--config" not in arguments[:-1]:
        return arguments
    at = arguments.index("--config")
    configured = yaml.safe_load(Path(arguments[at + 1]).read_text()) or {}
    rest = arguments[:at] + arguments[at + 2 :]
    model = [] if "model" not in configured else [str(configured.pop("model"))]
    if rest and not rest[0].startswith("-"):
        model, rest = rest[:1], rest[1:]
    return [*model, *(part for name, value in configured.items() for part in _as_arguments(name, value)), *rest]


def _as_arguments(name: str, value: object) -> list[str]:
    flag = f"--{name}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _check_parsers(given: argparse.Namespace) -> None:
    if given.enable_auto_tool_choice and not given.tool_call_parser:
        raise BadArguments("TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser")
    if given.enable_auto_tool_choice and given.tool_call_parser not in known_names.TOOL_PARSERS:
        raise BadArguments(_unknown("tool call", given.tool_call_parser, known_names.TOOL_PARSERS))
    if given.reasoning_parser and given.reasoning_parser not in known_names.REASONING_PARSERS:
        raise BadArguments(_unknown("reasoning", given.reasoning_parser, known_names.REASONING_PARSERS))


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    return f"KeyError: 'invalid {what} parser: {name} (chose from {{ {','.join(known)} }})'"


def _size(flag: str, text: str | None, default: int) -> int:
    """Parse vLLM's human-readable integers: 32k is 32,000 and 32K is 32,768; auto and -1 mean the default."""
    if text in (None, "auto", "-1"):
        return default
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(text))
    if found is None:
        raise BadArguments(f"argument --{flag}: invalid value: {text!r}")
    return int(float(found[1]) * _SIZES.get(found[2], 1))


def _step_time(text: str) -> StepTime:
    """Parse three numbers of seconds. Raises argparse.ArgumentTypeError."""
    try:
        base, per_sequence, per_prefill_token = map(float, text.split(","))
    except ValueError:
        base = per_sequence = per_prefill_token = -1.0
    if not 0 <= min(base, per_sequence, per_prefill_token) <= max(base, per_sequence, per_prefill_token) < math.inf:
        raise argparse.ArgumentTypeError("expected three numbers of seconds, e.g. 0.02,0.0001,0.0001")
    return StepTime(base, per_sequence, per_prefill_token)


def _loras(given: argparse.Namespace) -> tuple[Lora, ...]:
    loras = tuple(map(_lora, given.lora_modules or []))
    if loras and not given.enable_lora:
        raise BadArguments("RuntimeError: LoRA is not enabled. Use --enable-lora to enable LoRA.")
    return loras


def _lora(text: str) -> Lora:
    """``name=path``, or JSON if the text contains a comma (LoRAParserAction)."""
    if "=" in text and "," not in text:
        name, _, path = text.partition("=")
        return Lora(name, path)
    try:
        adapter = json.loads(text)
    except ValueError:
        adapter = None
    if not isinstance(adapter, dict) or not _LORA_NEEDS <= adapter.keys() <= _LORA_FIELDS:
        _parser().error(f"Invalid {'JSON format' if adapter is None else 'fields'} for --lora-modules: {text}")
    return Lora(adapter["name"], adapter["path"], adapter.get("base_model_name") or "")
