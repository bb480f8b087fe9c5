"""The vLLM that a launch command would run: which one it is, and which names it knows.

Owns the asking, which takes vLLM some ten seconds, and the cache that makes it happen once for each installed
version. The rule: whatever is wrong with that vLLM, the outcome is its names or None, within a bounded time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from upstream.vllm import print_names
from upstream.vllm.known_names import KnownNames

_ASK_WITHIN, _LOOK_WITHIN = 120.0, 10.0  # seconds
_LOOK = "import importlib.metadata as m; d = m.distribution('vllm'); print(d.version); print(d.locate_file('vllm'))"
# pip's two forms of a script's first lines: the interpreter itself, or, for a long path, a shell that runs it
_SHEBANG = re.compile(rb"#!(?:/bin/sh\n'''exec' )?\"?(/[^\"\n]*?)\"?(?: [^\n]*)?\n")


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """A vLLM that is here: the ``python`` that has it, its version, and its folder."""

    python: str
    version: str
    folder: str


def runs_vllm_itself(command: Sequence[str]) -> bool:
    """Whether a launch command is vLLM's own: ``vllm serve``, or a Python that runs one of vLLM's modules."""
    words = tuple(command)
    if len(words) > 1 and Path(words[0]).name == "vllm":
        return words[1] == "serve"
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else ()
    return Path(words[0]).name.startswith("python") and module != () and module[0].split(".")[0] == "vllm" if words else False


def known_names(command: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]) -> KnownNames | None:
    """The names that the command's vLLM knows; None where it is not installed or does not tell.

    ``environ`` is what the command would run with. ``say`` is called before the asking, where nothing is cached.
    """
    found = _installed(command, environ)
    if found is None:
        return None
    file = _cache(environ) / f"vllm-names-{hashlib.sha256(repr(found).encode()).hexdigest()[:16]}.json"
    cached = _read(file, found.version)
    if cached is not None:
        return cached
    say(f"asking vLLM {found.version} for its options (once; it takes some seconds)")
    said = _run(found.python, Path(print_names.__file__).read_text(), environ, _ASK_WITHIN)
    text = said.strip().rpartition("\n")[2]
    told = _parsed(text, found.version)
    if told is not None:
        with suppress(OSError):  # the next time asks again
            _keep(file, text)
    return told


def _installed(command: Sequence[str], environ: Mapping[str, str]) -> InstalledVllm | None:
    program = shutil.which(command[0], path=environ.get("PATH"))
    python = None if program is None else _interpreter(program)
    said = "" if python is None else _run(python, _LOOK, environ, _LOOK_WITHIN)
    lines = said.splitlines()
    return InstalledVllm(python, *lines) if python is not None and len(lines) == 2 else None


def _interpreter(program: str) -> str | None:
    """The Python that runs a program: itself, or the one that a script names."""
    if Path(program).name.startswith("python"):
        return program
    try:
        with open(program, "rb") as file:
            found = _SHEBANG.match(file.read(4096))
    except OSError:
        return None
    return os.fsdecode(found[1]) if found and b"python" in found[1] else None


def _run(python: str, program: str, environ: Mapping[str, str], within: float) -> str:
    """What a program text prints; nothing when it fails or takes too long. Python looks for modules where it is run: not here."""
    words = [python, "-c", program]
    try:
        done = subprocess.run(  # noqa: S603  the interpreter of the command that the operator has written
            words, env=dict(environ), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=within, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def _cache(environ: Mapping[str, str]) -> Path:
    """The user's cache (XDG base directories)."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-gateway"


def _read(file: Path, version: str) -> KnownNames | None:
    try:
        return _parsed(file.read_text(), version)
    except (OSError, UnicodeDecodeError):
        return None


def _parsed(text: str, version: str) -> KnownNames | None:
    try:
        told = json.loads(text)
        return KnownNames(version, *(frozenset(map(str, told[key])) for key in ("flags", "reasoning_parsers", "tool_parsers")))
    except (ValueError, KeyError, TypeError):
        return None


def _keep(file: Path, text: str) -> None:
    """Put it into its place as a whole, so that nobody reads a half."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False) as half:
        half.write(text)
    os.replace(half.name, file)
