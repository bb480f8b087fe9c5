"""The options of vLLM that name files and folders, and the folder of relative paths.

Owns the table. The rule: a relative path is relative to the folder of the configuration, like its other paths, and not to the gateway's
working directory. A value that may be something else (a name on the hub, an inline template) is unchanged unless the file exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from upstream.vllm.command_line import ArgumentValue, flag_of


class PathKind(Enum):
    """The kind of an option's value."""

    READ = auto()
    """A file or folder that vLLM reads."""
    TEMPLATE = auto()
    """A file with a chat template, the name of one of vLLM's templates, or the template itself (vllm/renderers/chat_utils.py)."""
    NAMED = auto()
    """A folder, or a name on the hub. Only a value that starts like a path is certain to be a path."""
    WRITTEN = auto()
    """A file or folder that vLLM creates."""


KINDS: Mapping[str, PathKind] = {
    "allowed-local-media-path": PathKind.READ,
    "chat-template": PathKind.TEMPLATE,
    "compilation-config.cache_dir": PathKind.WRITTEN,
    "compilation-config.debug_dump_path": PathKind.WRITTEN,
    "config": PathKind.READ,
    "download-dir": PathKind.WRITTEN,
    "generation-config": PathKind.NAMED,
    "hf-config-path": PathKind.NAMED,
    "log-config-file": PathKind.READ,
    "logging-config.pylogging_config_file": PathKind.READ,
    "mm-encoder-fp8-scale-path": PathKind.READ,
    "mm-encoder-fp8-scale-save-path": PathKind.WRITTEN,
    "profiler-config.torch_profiler_dir": PathKind.WRITTEN,
    "reasoning-parser-plugin": PathKind.READ,
    "spec-model": PathKind.NAMED,
    "speculative-config.model": PathKind.NAMED,
    "ssl-ca-certs": PathKind.READ,
    "tokenizer": PathKind.NAMED,
    "tool-parser-plugin": PathKind.READ,
}
"""The options of vLLM 0.32 that take a path, by flag without dashes. For an option that takes JSON, the field follows a dot."""

BUILT_IN_TEMPLATE = "template_"
"""The prefix of the names of vLLM's own templates (vllm/transformers_utils/chat_templates)."""
_INLINE = frozenset("{}\n")  # characters of a template that a path does not have
_SPECIAL_VALUES = {"generation-config": ("auto", "vllm")}  # values that are not paths
_LOCAL = ("/", "./", "../")


@dataclass(frozen=True, slots=True)
class PathArgument:
    """A path in the options. ``key`` and ``field``: its position; ``field`` only for an option that takes JSON."""

    key: str
    field: str | None
    kind: PathKind
    path: str


def is_local(text: str) -> bool:
    """Return whether a text that may be a name on the hub is certain to be a path."""
    return text.startswith(_LOCAL)


def paths(args: Mapping[str, ArgumentValue]) -> Iterator[PathArgument]:
    """Yield every path that the options may name."""
    for key, value in args.items():
        flag = flag_of(key)
        if isinstance(value, Mapping):
            for field, inner in value.items():
                yield from _named(key, field, f"{flag}.{field.replace('-', '_')}", inner)
        else:
            yield from _named(key, None, flag, value)


def _named(key: str, field: str | None, name: str, value: ArgumentValue) -> Iterator[PathArgument]:
    kind = KINDS.get(name)
    if kind is None or not isinstance(value, str) or not value:
        return
    if (kind is PathKind.TEMPLATE and _INLINE & set(value)) or value in _SPECIAL_VALUES.get(name, ()):
        return
    yield PathArgument(key, field, kind, value)


def has_to_exist(named: PathArgument) -> bool:
    """Return whether vLLM fails if the path does not exist."""
    if named.kind is PathKind.TEMPLATE:
        return is_local(named.path) or "/" in named.path or not named.path.startswith(BUILT_IN_TEMPLATE)
    return named.kind is PathKind.READ or (named.kind is PathKind.NAMED and is_local(named.path))


def absolute(args: Mapping[str, ArgumentValue], folder: Path, exists: Callable[[Path], bool], *, own: bool) -> dict[str, ArgumentValue]:
    """Return the options with absolute paths, for paths that exist in ``folder`` and for values that can only be paths.

    ``own``: the command is vLLM's own. Another command may run vLLM in a container, so only existing paths are changed.
    """
    found = dict(args)
    for named in paths(args):
        path = Path(os.path.abspath(folder / named.path))
        if exists(path) or (own and (named.kind is PathKind.WRITTEN or has_to_exist(named))):
            before = found[named.key]
            found[named.key] = {**before, named.field: str(path)} if isinstance(before, Mapping) and named.field else str(path)
    return found


def absolute_command(command: Sequence[str], folder: Path, exists: Callable[[Path], bool]) -> tuple[str, ...]:
    """Return a command with absolute paths for the programs that it names by ``./`` or ``../`` and that exist in ``folder``."""
    paths_of = ((text, Path(os.path.abspath(folder / text))) for text in command)
    return tuple(str(path) if text.startswith(("./", "../")) and exists(path) else text for text, path in paths_of)
