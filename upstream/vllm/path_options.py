"""The options of vLLM that name files and folders, and where a relative one begins.

Owns the table. The rule: an operator's relative path begins at the folder of the configuration, where its other paths begin, and not at
the folder in which the gateway happens to run. What may be something else than a path (a name on the hub, an inline template) stays as it
is written unless it is there as a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType

from upstream.vllm.command_line import ArgumentValue, flag_of


class PathKind(Enum):
    """What the value of an option is."""

    READ = auto()
    """A file or folder that vLLM reads."""
    TEMPLATE = auto()
    """A file with a chat template, the name of one that vLLM has, or the template itself (vllm/renderers/chat_utils.py)."""
    NAMED = auto()
    """A folder, or a name on the hub; only what begins like a path is one for certain."""
    WRITTEN = auto()
    """What vLLM makes itself."""


KINDS: Mapping[str, PathKind] = MappingProxyType(
    {
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
)
"""The options of vLLM 0.32 by their flag without dashes; of an option that takes JSON, the field behind a dot."""

BUILT_IN_TEMPLATE = "template_"
"""How the names of vLLM's own templates begin (vllm/transformers_utils/chat_templates)."""
_INLINE = frozenset("{}\n")  # what tells a template from a path
_WORDS = {"generation-config": ("auto", "vllm")}  # values with a meaning of their own
_LOCAL = ("/", "./", "../")


@dataclass(frozen=True, slots=True)
class PathArgument:
    """A path in the options. ``key`` and ``field``: where it stands, ``field`` only in an option that takes JSON."""

    key: str
    field: str | None
    kind: PathKind
    path: str


def is_local(text: str) -> bool:
    """Whether a text that may be a name on the hub is a path for certain."""
    return text.startswith(_LOCAL)


def paths(args: Mapping[str, ArgumentValue]) -> Iterator[PathArgument]:
    """Every path that the options may name."""
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
    if (kind is PathKind.TEMPLATE and _INLINE & set(value)) or value in _WORDS.get(name, ()):
        return
    yield PathArgument(key, field, kind, value)


def has_to_exist(named: PathArgument) -> bool:
    """Whether vLLM fails where nothing is at the path."""
    if named.kind is PathKind.TEMPLATE:
        return is_local(named.path) or "/" in named.path or not named.path.startswith(BUILT_IN_TEMPLATE)
    return named.kind is PathKind.READ or (named.kind is PathKind.NAMED and is_local(named.path))


def absolute(args: Mapping[str, ArgumentValue], folder: Path, exists: Callable[[Path], bool], *, own: bool) -> dict[str, ArgumentValue]:
    """The options with relative paths made absolute: those that ``exist`` in ``folder``, and those that can be nothing but a path.

    ``own``: the command is vLLM's own. Another one may run vLLM in a container, where only what is here is certain to be meant.
    """
    found = dict(args)
    for named in paths(args):
        path = Path(os.path.abspath(folder / named.path))
        if exists(path) or (own and (named.kind is PathKind.WRITTEN or has_to_exist(named))):
            before = found[named.key]
            found[named.key] = {**before, named.field: str(path)} if isinstance(before, Mapping) and named.field else str(path)
    return found


def absolute_words(command: Sequence[str], folder: Path, exists: Callable[[Path], bool]) -> tuple[str, ...]:
    """A command with the scripts and programs that it names by ``./`` or ``../`` made absolute, where they are in ``folder``."""

    def word(text: str) -> str:
        path = Path(os.path.abspath(folder / text))
        return str(path) if text.startswith(("./", "../")) and exists(path) else text

    return tuple(map(word, command))
