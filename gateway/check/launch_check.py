"""The launches of a configuration held against this machine: for ``check``, when the gateway starts, and before a reload replaces a server.

Owns what is asked of the machine for it; what is wrong is decided in ``preflight``. The rule: an environment is the one that launched
servers inherit, so that a program is looked for where it will be executed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from gateway.check import preflight
from gateway.config import Problem
from gateway.config.references import Draft
from upstream.launcher.program import why_not_executable
from upstream.vllm import gpus, installed_vllm, known_names
from upstream.vllm.known_names import KnownNames


class LaunchCheck:
    """Checks launches for a gateway whose servers inherit ``environ``.

    ``say`` reports that vLLM is asked for its options, which takes some seconds, once for each installed version. The methods read files
    and run programs: call them in a thread.
    """

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._environ = environ
        self._say = say

    def problems(self, draft: Draft) -> list[Problem]:
        """Everything that the launches would fail on, and notes."""
        return list(preflight.problems(draft, self._machine(draft, gpus.count(self._environ))))

    def certain_failures(self, draft: Draft, models: Set[str]) -> list[Problem]:
        """What keeps the servers of these models from starting."""
        return preflight.certain_failures(draft, self._machine(draft, gpus.count(self._environ)), models) if models else []

    def missing(self, draft: Draft) -> list[Problem]:
        """Programs and files that launches need and that are not there."""
        return preflight.missing(draft, self._machine(draft, None))

    def _machine(self, draft: Draft, gpu_count: int | None) -> preflight.Machine:

        @functools.cache
        def names(command: tuple[str, ...]) -> KnownNames:
            return installed_vllm.known_names(command, self._environ, self._say) or known_names.built_in()

        def executable(program: str, path: str | None) -> str:
            return why_not_executable(program, path or self._environ.get("PATH", os.defpath))

        return preflight.Machine(names, gpu_count, Path(os.path.abspath(draft.main.file)).parent, executable)
