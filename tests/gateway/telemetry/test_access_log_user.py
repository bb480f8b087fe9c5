"""The client's ``user`` can identify a person, so it is logged only if the operator enables it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.support.process import configuration, gateway, launched, wait_for


@pytest.mark.parametrize("is_logged", [True, False])
def test_the_user_is_logged_only_if_the_operator_says_so(tmp_path: Path, is_logged: bool) -> None:
    config = configuration(launched()) | {"log": {"user": is_logged}}
    with gateway(tmp_path, config) as one:
        assert one.request(user="zoe@example.com").status_code == 200
        line = orjson.loads(wait_for(lambda: one.log.splitlines())[0])
        assert line.get("user") == ("zoe@example.com" if is_logged else None)
        assert is_logged or "zoe" not in one.log  # which no hexadecimal digits spell
