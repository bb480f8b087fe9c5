"""The program that asks a vLLM for its names, run with stand-ins for vLLM's modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upstream.vllm import print_names

MANAGER = """\
class {name}ParserManager:
    @staticmethod
    def list_registered():
        return ["{name}"]
"""
ARGUMENTS = """\
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
def make_arg_parser(parser):
    print("a message of vLLM", end="")
    parser.add_argument("--flag", action=argparse.BooleanOptionalAction)
    parser.add_argument("-s", "--second")
    parser.add_argument("model")
    return parser
"""


@pytest.mark.parametrize("module", ["launchers", "openai"])
def test_the_names_are_the_last_line_in_every_supported_version(tmp_path: Path, module: str) -> None:
    """The module of the options has another name since vLLM 0.32."""
    for name, text in {
        "reasoning": MANAGER.format(name="Reasoning"),
        "tool_parsers": MANAGER.format(name="Tool"),
        "utils/argparse_utils": ARGUMENTS,
        f"entrypoints/{module}/cli_args": ARGUMENTS,
    }.items():
        file = tmp_path / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, print_names.__file__], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "flags": ["flag", "help", "no-flag", "second"],
        "reasoning_parsers": ["Reasoning"],
        "tool_parsers": ["Tool"],
    }
