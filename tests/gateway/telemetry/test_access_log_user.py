"""The client's ``user`` is somebody's name: it is logged only where the operator says so."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.support.process import configuration, gateway, launched, wait_for


@pytest.mark.parametrize("told", [True, False])
def test_the_user_is_logged_only_if_the_operator_says_so(tmp_path: Path, told: bool) -> None:
    config = configuration(launched()) | {"log": {"user": told}}
    with gateway(tmp_path, config) as one:
        assert one.request(user="zoe@example.com").status_code == 200
        line = orjson.loads(wait_for(lambda: one.log.splitlines())[0])
        assert line.get("user") == ("zoe@example.com" if told else None)
        assert told or "zoe" not in one.log  # which no hexadecimal digits spell
