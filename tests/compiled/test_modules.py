"""The modules that an ordinary request goes through are compiled, or listed here with a reason."""

from __future__ import annotations

import re
import subprocess
import sys

from compiled.hook import MODULES
from tests.gateway.test_cost import BOUNDS, ROOT

INTERPRETED = {
    "gateway.auth.keyring": "a request calls two functions of it, which look a digest up: 49 steps of 3,600",
    "gateway.telemetry.request_ids": "a request takes one step of its generator, and the random bytes are those of 256 requests",
    "gateway.system.steps": "a request calls one function of it, which compares two numbers: 10 steps of 3,600",
}
"""Modules on the data path that stay interpreted, and why."""


def test_the_modules_of_a_request_are_compiled() -> None:
    """The functions of each counted exchange are known by their files."""
    command = [sys.executable, "-m", "tests.gateway.test_cost", *BOUNDS]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    used = {path.replace("/", ".") for path in re.findall(r"  ((?:gateway|upstream)/[\w/]+)\.py:", printed)}
    assert len(used) > 30
    assert used - set(MODULES) == INTERPRETED.keys(), "add a module to MODULES in compiled/hook.py, or to INTERPRETED with a reason"
