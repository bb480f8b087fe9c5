"""Which NVIDIA GPUs this machine has, by the numbers that CUDA_VISIBLE_DEVICES takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_WITHIN = 10.0  # seconds for nvidia-smi


def count(environ: Mapping[str, str]) -> int | None:
    """How many there are: their numbers are those below. None where there is no NVIDIA driver."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    told = None if program is None else _listed(program, environ)
    if told is not None:
        return told
    try:
        return len(os.listdir(_DRIVER))
    except OSError:
        return None


def _listed(program: str, environ: Mapping[str, str]) -> int | None:
    """The lines of ``nvidia-smi -L``, one a GPU; None where it fails, as without a driver."""
    try:
        done = subprocess.run(  # noqa: S603  found on PATH
            [program, "-L"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WITHIN, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
