"""Compare the launches of a configuration with this machine: for ``check``, at the start, and before a reload replaces a server.

Owns the queries of the machine. ``preflight`` decides what is wrong. The rule: programs are searched in the environment that launched
servers inherit, where they will be executed.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.check import preflight
from gateway.config.references import Draft
from gateway.config.source import reason
from upstream.launcher.program import why_not_executable
from upstream.vllm import gpus, installed_vllm, known_names
from upstream.vllm.known_names import KnownNames


def why_not_listening(host: str) -> str:
    """Return why this machine cannot listen on a host, or an empty text."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError) as error:
        return reason(error).lower()
    return ""


def this_machine(draft: Draft, environ: Mapping[str, str], say: Callable[[str], None], *, with_gpus: bool = True) -> preflight.Machine:
    """Return this machine as ``preflight`` knows it, for launched servers that inherit ``environ``. Its GPUs are counted if needed.

    ``say`` reports that vLLM is run to list its options, which takes some seconds, once for each installed version. This and the checks
    read files and run programs, so call them in a thread.
    """

    @functools.cache
    def names(command: tuple[str, ...]) -> KnownNames:
        return installed_vllm.known_names(command, environ, say) or known_names.built_in()

    def executable(program: str, path: str | None) -> str:
        return why_not_executable(program, path or environ.get("PATH", os.defpath))

    gpu_count = gpus.count(environ) if with_gpus else None
    return preflight.Machine(names, gpu_count, Path(os.path.abspath(draft.main.file)).parent, executable, why_not_listening)
