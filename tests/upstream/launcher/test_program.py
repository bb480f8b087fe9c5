"""Whether a program can be executed, without running it."""

from __future__ import annotations

import socket
from pathlib import Path

from upstream.launcher.program import why_not_executable
from upstream.vllm.installed_vllm import known_names


def test_a_program_that_cannot_be_read_is_left_for_the_kernel_to_refuse(tmp_path: Path) -> None:
    """A socket in place of the program: it has the permission to be executed, and cannot be opened, not even by root."""
    program = tmp_path / "vllm"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(program))
        program.chmod(0o755)
        assert why_not_executable("vllm", str(tmp_path)) == ""
        assert known_names((str(program), "serve"), {}, lambda _: None) is None


def test_a_script_whose_interpreter_does_not_exist(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    for line, reason in (
        ("#!/no/such/python", f"{program} cannot be executed: its interpreter /no/such/python does not exist"),
        ("#!/bin/sh -e", ""),
        ("#!", ""),
        ("\x7fELF", ""),
    ):
        program.write_text(line + "\n")
        program.chmod(0o755)
        assert why_not_executable(str(program), "") == reason
