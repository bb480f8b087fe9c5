"""Checks whether a program can be executed, before a server is started with it.

The rule: no program is run, so the check costs only a few system calls. A program that is found may still fail.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

VLLM = "vllm"
_FIRST_LINE = 256  # bytes; the kernel reads as many (linux/binfmts.h, BINPRM_BUF_SIZE)


def why_not_executable(program: str, search: str) -> str:
    """Return why ``program`` cannot be executed, as text that follows a setting's name; empty if it can. ``search``: as in PATH."""
    if (found := shutil.which(program, path=search)) is None:
        return _why_not_found(program)
    if (interpreter := _interpreter(found)) and shutil.which(interpreter) is None:
        return f"{program} cannot be executed: its interpreter {interpreter} does not exist"
    return ""


def _why_not_found(program: str) -> str:
    if program == VLLM:
        return (
            "vllm is not found in PATH. Install vLLM (`python3 -m venv /opt/vllm && /opt/vllm/bin/pip install vllm`) and write "
            "launch.command: [/opt/vllm/bin/vllm, serve]; or try it without vLLM: launch.command: [vllm-gateway, simulate]"
        )
    if "/" not in program:
        return f"{program} is not found in PATH: write its whole path, or set PATH in launch.env"
    path = Path(program)
    if not path.exists():
        return f"{program} does not exist"
    return f"{program} is a folder" if path.is_dir() else f"{program} is not executable"


def _interpreter(script: str) -> str:
    """Return the program in the first line of a script; empty if the file is not a script or cannot be read."""
    try:
        with open(script, "rb") as file:
            line = file.readline(_FIRST_LINE)
    except OSError:
        return ""
    return os.fsdecode(line[2:].split()[0]) if line.startswith(b"#!") and line[2:].split() else ""
