"""The real vLLM, launched by the gateway, under the filter of system calls that the systemd unit has for both."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.deploy import confined
from tests.support.process import PROGRAM, configuration, gateway
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, installed, launch

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "vllm-gateway.service"
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)")
def test_vllm_needs_no_system_call_that_the_unit_forbids(tmp_path: Path) -> None:
    config = configuration({"id": "tests/tiny", "launch": launch("qwen3")})
    line: list[str | Path] = [sys.executable, confined.__file__, UNIT, PROGRAM, "serve", tmp_path / "gateway.yaml"]
    with gateway(tmp_path, config, line=line, seconds=START_WITHIN) as one:
        assert one.request(model="tests/tiny", max_tokens=20).status_code == 200
        assert {confined.filters(each.pid) for each in one.tree()} == {confined.filters(os.getpid()) + 1}
