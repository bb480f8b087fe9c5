"""The core that runs is the installed one, and ``--version`` shows it."""

from __future__ import annotations

import os
import subprocess

from gateway import __version__
from gateway.system.compiled_core import core
from tests.support.process import PROGRAM

EXPECTED = os.environ.get("EXPECTED_CORE", "python")  # tests/compiled/__main__.py sets it


def test_the_core_is_the_installed_one() -> None:
    assert core() == EXPECTED


def test_the_version_shows_the_core() -> None:
    shown = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown == f"vllm-gateway {__version__} ({EXPECTED} core)\n"
