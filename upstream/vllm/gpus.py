"""Counts the NVIDIA GPUs of this machine, by the numbers of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TIMEOUT = 10.0  # seconds for nvidia-smi


def count(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs, which are numbered from 0. None without an NVIDIA driver."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    number = None if program is None else _listed(program, environ)
    if number is not None:
        return number
    try:
        return len(os.listdir(_DRIVER))
    except OSError:
        return None


def _listed(program: str, environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs in ``nvidia-smi -L``. None if it fails, e.g. without a driver."""
    try:
        done = subprocess.run(  # noqa: S603  found on PATH
            [program, "-L"], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
