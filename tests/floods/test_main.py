"""``make floods`` with one flood and a short round."""

from __future__ import annotations

import re

import pytest

from tests.floods.__main__ import main
from tests.floods.requests import FLOODS


def test_a_flood_is_measured_beside_another_client(capsys: pytest.CaptureFixture[str]) -> None:
    name = next(iter(FLOODS))
    assert main([name, "--seconds", "0.2", "--rounds", "1"]) == 0
    assert re.search(rf"^{name} +[\d.]+ ms +[\d.]+ ms +[\d.]+$", capsys.readouterr().out, re.MULTILINE)
