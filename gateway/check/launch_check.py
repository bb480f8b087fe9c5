"""Compare the launches of a configuration with this machine: for ``check``, at the start, and before a reload replaces a server.

Owns the queries of the machine. ``preflight`` decides what is wrong. The rule: programs are searched in the environment that launched
servers inherit, where they will be executed.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from gateway.check import preflight
from gateway.config import Problem
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


class LaunchCheck:
    """Checks launches for a gateway whose servers inherit ``environ``.

    ``say`` reports that vLLM is run to list its options, which takes some seconds, once for each installed version. The methods read files
    and run programs, so call them in a thread.
    """

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._environ = environ
        self._say = say

    def problems(self, draft: Draft) -> list[Problem]:
        """Return every reason why the launches would fail, and notes."""
        return list(preflight.problems(draft, self._machine(draft, gpus.count(self._environ))))

    def certain_failures(self, draft: Draft, models: Set[str]) -> list[Problem]:
        """Return what prevents the servers of these models from starting."""
        return preflight.certain_failures(draft, self._machine(draft, gpus.count(self._environ)), models) if models else []

    def missing(self, draft: Draft) -> list[Problem]:
        """Return the programs and files that launches need and that are missing."""
        return preflight.missing(draft, self._machine(draft, None))

    def _machine(self, draft: Draft, gpu_count: int | None) -> preflight.Machine:

        @functools.cache
        def names(command: tuple[str, ...]) -> KnownNames:
            return installed_vllm.known_names(command, self._environ, self._say) or known_names.built_in()

        def executable(program: str, path: str | None) -> str:
            return why_not_executable(program, path or self._environ.get("PATH", os.defpath))

        return preflight.Machine(names, gpu_count, Path(os.path.abspath(draft.main.file)).parent, executable, why_not_listening)
