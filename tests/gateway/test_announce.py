"""What the operator reads on standard error."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from gateway.announce import Announcer
from gateway.config import load
from gateway.serve import StartError, listen
from tests.support.process import configuration, launched, write


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]"), ("::", "localhost")])
def test_the_addresses_are_such_as_a_client_takes(tmp_path: Path, host: str, shown: str) -> None:
    write(tmp_path / "gateway.yaml", configuration(launched()))
    said = io.StringIO()
    try:
        data, admin = listen(host, 0), listen(host, 0)
    except StartError as error:
        pytest.skip(f"this machine has no such address: {error}")
    with closing(data), closing(admin):
        Announcer(Console(file=said, width=200)).summary(load(tmp_path / "gateway.yaml"), data, admin)
        assert f"http://{shown}:{data.getsockname()[1]}/v1 " in said.getvalue()
        assert f"http://{shown}:{admin.getsockname()[1]}/metrics " in said.getvalue()
