"""The installed vLLM that a launch command would run: its version, and the names that it knows.

Owns the query, which takes vLLM about ten seconds, and the cache, so that it happens once for each installed version. The rule: the result
is the names or None, within a limited time, whatever is wrong with that vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from upstream.vllm import print_names
from upstream.vllm.gpus import output_of
from upstream.vllm.known_names import KnownNames

_NAMES_TIMEOUT, _VERSION_TIMEOUT = 120.0, 10.0  # seconds
_VERSION_PROGRAM = "import importlib.metadata as m; d = m.distribution('vllm'); print(d.version); print(d.locate_file('vllm'))"
_INVALID = (ValueError, KeyError, TypeError)  # raised for a text without the names
# pip's two forms of a script's first lines: the interpreter itself, or, for a long path, a shell that runs it
_SHEBANG = re.compile(rb"#!(?:/bin/sh\n'''exec' )?\"?(/[^\"\n]*?)\"?(?: [^\n]*)?\n")


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """An installed vLLM: its Python interpreter, its version and its folder."""

    python: str
    version: str
    folder: str


def runs_vllm_itself(command: Sequence[str]) -> bool:
    """Return whether a launch command is vLLM's own: ``vllm serve``, or a Python that runs a module of vLLM."""
    arguments = tuple(command)
    if len(arguments) > 1 and Path(arguments[0]).name == "vllm":
        return arguments[1] == "serve"
    module = arguments[arguments.index("-m") + 1 :][:1] if "-m" in arguments else ()
    return Path(arguments[0]).name.startswith("python") and module != () and module[0].split(".")[0] == "vllm" if arguments else False


def known_names(command: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]) -> KnownNames | None:
    """Return the names that the command's vLLM knows; None if it is not installed or the query fails.

    ``environ``: the environment of the command. ``say`` is called before a query, which happens if nothing is cached.
    """
    if (found := _installed(command, environ)) is None:
        return None
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # the user's cache folder (XDG base directories)
    file = folder / "vllm-gateway" / f"vllm-names-{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}.json"
    with suppress(OSError, *_INVALID):
        return _parsed(file.read_text(), found.version)
    say(f"reading the options of vLLM {found.version} (once; it takes some seconds)")
    program = Path(print_names.__file__).read_text()
    text = (output_of([found.python, "-c", program], environ, _NAMES_TIMEOUT, "/") or "").strip().rpartition("\n")[2]
    try:
        known = _parsed(text, found.version)
    except _INVALID:
        return None
    with suppress(OSError):  # the next call queries again
        _store(file, text)
    return known


def _installed(command: Sequence[str], environ: Mapping[str, str]) -> InstalledVllm | None:
    program = shutil.which(command[0], path=environ.get("PATH"))
    python = None if program is None else _interpreter(program)
    output = None if python is None else output_of([python, "-c", _VERSION_PROGRAM], environ, _VERSION_TIMEOUT, "/")
    lines = (output or "").splitlines()
    return InstalledVllm(python, *lines) if python is not None and len(lines) == 2 else None


def _interpreter(program: str) -> str | None:
    """Return the Python that runs a program: the program itself, or the interpreter of a script."""
    if Path(program).name.startswith("python"):
        return program
    try:
        with open(program, "rb") as file:
            found = _SHEBANG.match(file.read(4096))
    except OSError:
        return None
    return os.fsdecode(found[1]) if found and b"python" in found[1] else None


def _parsed(text: str, version: str) -> KnownNames:
    names = json.loads(text)
    return KnownNames(version, *(frozenset(map(str, names[key])) for key in ("flags", "reasoning_parsers", "tool_parsers")))


def _store(file: Path, text: str) -> None:
    """Write a file atomically, so that no process reads a part of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as temporary:
        temporary.write(text)
    os.replace(temporary.name, file)
