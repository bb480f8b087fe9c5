"""Counts the NVIDIA GPUs of this machine, by the numbers of CUDA_VISIBLE_DEVICES, which ``command_line`` sets for a launched server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT = 10.0  # seconds for nvidia-smi


def count(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs, which are numbered from 0. None without an NVIDIA driver."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is not None and (listed := output_of([program, "-L"], environ, _TIMEOUT)) is not None:
        return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    try:
        return len(os.listdir(_DRIVER))
    except OSError:
        return None


def output_of(command: Sequence[str], environ: Mapping[str, str], within: float, folder: str | None = None) -> str | None:
    """Run a program of this machine, and return its output; None if it fails or takes longer than ``within`` seconds."""
    try:
        done = subprocess.run(  # noqa: S603  found on PATH, or written by the operator
            command, env=dict(environ), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=within, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
