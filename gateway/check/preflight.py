"""Checks of launches before they are tried: missing programs and files, options that vLLM does not have, GPUs.

Every check is a generator over the raw document, as in ``config.references``, and gets what is known of this machine. Nothing here runs a
program. The rule: a command other than vLLM's is not compared with vLLM's options, and what is only unusual is a note.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.check.lint import note
from gateway.config import Note, Problem
from gateway.config.models import Launch, matches
from gateway.config.problems import did_you_mean
from gateway.config.references import ConfigValue, Draft, own_names, texts
from gateway.config.source import reason
from gateway.config.values import exists
from upstream.vllm.command_line import flag_of
from upstream.vllm.installed_vllm import runs_vllm_itself
from upstream.vllm.known_names import KnownNames
from upstream.vllm.path_options import absolute_command, has_to_exist, is_local, paths
from upstream.vllm.presets import PRESETS, preset_for

_DECIDED = {"reasoning-parser", "tool-call-parser", "enable-auto-tool-choice", "config", "runner", "convert"}
"""Options that show that the operator has chosen the parsers, or that the model does not generate text."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which the servers would run.

    ``names`` returns what the vLLM of a command knows. ``gpus`` is the number of GPUs, or None without an NVIDIA driver. ``folder`` is for
    relative paths. ``why_not_executable`` explains why a program cannot be executed with a PATH (None: that of the servers' environment),
    and ``why_not_listening`` why the gateway cannot listen on a host; both return an empty text otherwise.
    """

    names: Callable[[tuple[str, ...]], KnownNames]
    gpus: int | None
    folder: Path
    why_not_executable: Callable[[str, str | None], str] = lambda _program, _path: ""
    why_not_listening: Callable[[str], str] = lambda _host: ""


@dataclass(frozen=True, slots=True)
class _Launched:
    """The valid parts of a launched model. ``args`` are its options by flag, ``written`` by key."""

    model: ConfigValue
    launch: ConfigValue
    command: tuple[str, ...]
    args: Mapping[str, ConfigValue]
    written: Mapping[str, ConfigValue]

    def value(self, flag: str) -> Any:
        return self.args[flag].value if flag in self.args else None

    def gpus(self) -> Iterator[tuple[ConfigValue, ConfigValue]]:
        """Yield each replica with each of its GPUs."""
        for replica in self.launch.each("gpus"):
            yield from ((replica, gpu) for gpu in replica.items() if type(gpu.value) is int and gpu.value >= 0)


def problems(draft: Draft, machine: Machine) -> Iterator[Problem]:
    """Yield every reason why a launch, a port or the ledger's file would fail, and notes."""
    launched = _all_launched(draft)
    yield from _hosts(draft, machine)
    yield from _ledger_folder(draft, machine.folder)
    for each in launched:
        yield from _certain(each, machine)
        if runs_vllm_itself(each.command):
            yield from _priorities(each, draft)
            yield from _family(each)
    yield from _gpus(launched, machine.gpus)
    yield from _shared_gpus(launched)


def _hosts(draft: Draft, machine: Machine) -> Iterator[Problem]:
    for host in (draft.top.get("server", "host"), draft.top.get("server", "admin", "host")):
        if isinstance(host.value, str) and (why := machine.why_not_listening(host.value)):
            yield host.problem(f"the gateway cannot listen here: {why}; write an address of this machine, 127.0.0.1, or 0.0.0.0 for all")


def _ledger_folder(draft: Draft, folder: Path) -> Iterator[Problem]:
    """Check that the folder of a SQLite file exists. While it does not, the gateway runs, and rows wait on disk."""
    url = draft.top.get("ledger").url
    if not isinstance(url.value, str) or not url.value.startswith("sqlite:///"):
        return
    parent = (folder / url.value.removeprefix("sqlite:///")).parent
    if not parent.is_dir():
        yield url.problem(f"the folder {parent} does not exist; create it, or write the path of a file in another folder")


def certain_failures(draft: Draft, machine: Machine, models: Set[str]) -> list[Problem]:
    """Return what prevents the servers of these models from starting, whatever else runs on the machine."""
    launched = [each for each in _all_launched(draft) if each.model.get("id").value in models]
    own = [each for each in launched if runs_vllm_itself(each.command)]
    found = [*(problem for each in launched for problem in _certain(each, machine)), *_gpus(own, machine.gpus)]
    return [problem for problem in found if not isinstance(problem, Note)]


def missing(draft: Draft, machine: Machine) -> list[Problem]:
    """Return the programs and files that launches need and that are missing, without running vLLM."""
    return [problem for each in _all_launched(draft) for problem in _missing(each, machine)]


def _certain(each: _Launched, machine: Machine) -> Iterator[Problem]:
    yield from _missing(each, machine)
    if runs_vllm_itself(each.command):
        names = machine.names(each.command)
        yield from _flags(each, names)
        yield from _parsers(each, names)
        yield from _automatic_tools(each)


def _missing(each: _Launched, machine: Machine) -> Iterator[Problem]:
    yield from _program(each, machine)
    if runs_vllm_itself(each.command):
        yield from _weights(each, machine.folder)
        yield from _files(each, machine.folder)


def _all_launched(draft: Draft) -> list[_Launched]:
    return [_launched(model) for model in draft.models if isinstance(model.get("launch").value, dict)]


def _launched(model: ConfigValue) -> _Launched:
    launch = model.get("launch")
    written = launch.get("command")
    parts = texts(written.items())
    command = tuple(parts) if parts == written.value else ()
    if written.value is None:
        command = Launch.model_fields["command"].default
    args = launch.get("args")
    keys = [key for key in args.value if isinstance(key, str)] if isinstance(args.value, dict) else []
    flags = {flag_of(key).partition(".")[0].rstrip("+"): args.get(key) for key in keys}
    return _Launched(model, launch, command, _of_the_preset(launch.get("preset")) | flags, {key: args.get(key) for key in keys})


def _of_the_preset(preset: ConfigValue) -> dict[str, ConfigValue]:
    """Return the options that a preset sets, each at the position of the preset."""
    known = PRESETS.get(preset.value) if isinstance(preset.value, str) else None
    return {} if known is None else {flag: ConfigValue(preset.source, preset.path, value) for flag, value in known.args.items()}


def _program(each: _Launched, machine: Machine) -> Iterator[Problem]:
    """Check that the first word of the command is a program in the PATH of the server."""
    if not each.command:
        return
    [program] = absolute_command(each.command[:1], machine.folder, exists)
    path = each.launch.get("env", "PATH").value
    if why := machine.why_not_executable(program, path if isinstance(path, str) else None):
        written = each.launch.get("command")
        yield (each.launch if written.value is None else written).problem(why)
    elif Path(program).name == "vllm-gateway" and each.command[1:2] != ("simulate",):
        yield each.launch.get("command").problem("this command serves no model; write [vllm-gateway, simulate]")


def _files(each: _Launched, folder: Path) -> Iterator[Problem]:
    """Check that files of options exist. Relative paths start from the configuration's folder."""
    args = {key: value.value for key, value in each.written.items()}
    for named in paths(args):
        if has_to_exist(named) and (wrong := _nothing_at(folder / named.path)):
            value = each.written[named.key]
            yield (value.get(named.field) if named.field else value).problem(wrong)


def _flags(each: _Launched, names: KnownNames) -> Iterator[Problem]:
    for flag, value in each.args.items():
        if not names.knows(flag):
            plain = [known for known in names.flags if not known.startswith("no-")]
            yield value.problem(f"vLLM {names.version} has no option --{flag}{did_you_mean(flag, plain)}")
        elif value.value is False and not names.knows(f"no-{flag}"):
            yield value.problem(f"vLLM {names.version} has no option --no-{flag}: leave {flag} out")


def _parsers(each: _Launched, names: KnownNames) -> Iterator[Problem]:
    kinds = {
        "reasoning-parser": (names.reasoning_parsers, "reasoning-parser-plugin"),
        "tool-call-parser": (names.tool_parsers, "tool-parser-plugin"),
    }
    for flag, (known, plugin) in kinds.items():
        value = each.value(flag)
        if isinstance(value, str) and value and value not in known and plugin not in each.args:
            yield each.args[flag].problem(f"vLLM {names.version} has no {flag} of this name{did_you_mean(value, known)}")


def _automatic_tools(each: _Launched) -> Iterator[Problem]:
    parser, automatic = each.value("tool-call-parser"), each.value("enable-auto-tool-choice")
    if "config" in each.args:
        return  # vLLM's own configuration file may contain the other option
    if automatic is True and not parser:
        yield each.args["enable-auto-tool-choice"].problem("vLLM does not start with this and without tool-call-parser")
    if parser and automatic is not True:
        yield note(each.args["tool-call-parser"], "has no effect without enable-auto-tool-choice: true; requests with tools are rejected")


def _family(each: _Launched) -> Iterator[Problem]:
    """Report missing tool calls and reasoning of a known model family, and a missing template for a preset's tool calls."""
    preset = each.launch.get("preset")
    if preset.value is None:
        named = each.launch.get("model").value or each.model.get("id").value
        family = preset_for(named) if isinstance(named, str) and not each.args.keys() & _DECIDED else None
        if family is not None:
            what = " and ".join(filter(None, ("tool calls" * bool(PRESETS[family].tools), "reasoning" * bool(PRESETS[family].reasoning))))
            yield note(each.launch, f"{what} are not set up; `preset: {family}` sets up the parsers of this family")
        return
    template = PRESETS[preset.value].template if isinstance(preset.value, str) and preset.value in PRESETS else ""
    if template and "chat-template" not in each.args:
        yield note(preset, f"for tool calls vLLM recommends chat-template: {template}, of the examples in its repository")


def _priorities(each: _Launched, draft: Draft) -> Iterator[Problem]:
    """Report priorities without effect: vLLM's default is first come first served, and without a limit no request is queued."""
    keys = [key for key in draft.keys if key.get("priority").value is not None and _may_use(key, each.model)]
    has_order = each.model.get("max_inflight").value is not None or each.value("scheduling-policy") == "priority"
    if keys and not has_order and "config" not in each.args:
        message = f"has no effect on `{each.model.get('id').value}` without max_inflight, or scheduling-policy: priority in its launch.args"
        yield note(keys[0].get("priority"), message)


def _may_use(key: ConfigValue, model: ConfigValue) -> bool:
    scoped = any(matches(pattern, name) for pattern in texts(key.each("models")) for name in texts(own_names(model)))
    return scoped or key.get("models").value is None


def _weights(each: _Launched, folder: Path) -> Iterator[Problem]:
    """Check that weights which are written as a path exist. Every other name is a name on the hub."""
    named = each.launch.get("model")
    written = [each.model.get("id") if named.value is None else named, *(lora.get("path") for lora in each.model.each("loras"))]
    for value in written:
        if isinstance(value.value, str) and is_local(value.value) and (wrong := _nothing_at(folder / value.value)):
            yield value.problem(wrong)


def _nothing_at(path: Path) -> str:
    """Explain why a server would find nothing at a path, with an empty text if it would."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return "there is no such file or folder"
    except OSError as error:  # e.g. a folder without access, or a name that is too long
        return f"cannot be read: {reason(error)}"
    return ""


def _gpus(launched: Sequence[_Launched], count: int | None) -> Iterator[Problem]:
    wanted = [gpu for each in launched for _replica, gpu in each.gpus()]
    if count is None:
        yield from (note(gpu, "there is no NVIDIA driver on this machine, so GPUs are not checked") for gpu in wanted[:1])
        return
    there = {0: "this machine has no GPU", 1: "only GPU 0 exists"}.get(count, f"the GPUs of this machine are 0 to {count - 1}")
    yield from (gpu.problem(f"there is no GPU {gpu.value}: {there}") for gpu in wanted if gpu.value >= count)


def _shared_gpus(launched: Sequence[_Launched]) -> Iterator[Problem]:
    owners: defaultdict[int, list[tuple[_Launched, ConfigValue]]] = defaultdict(list)
    for each in launched:
        for replica, gpu in each.gpus():
            before = next((found for found in owners[gpu.value] if _both_at_once(*found, each, replica)), None)
            if before is not None:
                yield gpu.problem(_sharing(gpu, *before, each))
            owners[gpu.value].append((each, replica))


def _both_at_once(one: _Launched, replica: ConfigValue, other: _Launched, other_replica: ConfigValue) -> bool:
    """Return whether the gateway would run both at the same time. Models on demand alternate, and so do the models of a group."""
    if one is other:
        return replica.path != other_replica.path
    group = one.launch.get("group").value
    is_grouped = group is not None and group == other.launch.get("group").value
    return not is_grouped and all(each.launch.get("start").value in (None, "eager") for each in (one, other))


def _sharing(gpu: ConfigValue, owner: _Launched, replica: ConfigValue, each: _Launched) -> str:
    if owner is each:
        return f"GPU {gpu.value} is already used by another replica; each replica needs its own GPUs"
    where = f"`{owner.model.get('id').value}` (line {replica.source.line(replica.path)})"
    return f"GPU {gpu.value} is given to {where} too, and both run at the same time: start one on_demand, or put both into one group"
