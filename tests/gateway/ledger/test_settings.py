"""The ledger's configuration: a URL alone or a section, and its part of the snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, ConfigurationError, load
from gateway.fleet.observed_servers import ObservedServers
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.snapshot.money import Price
from gateway.snapshot.snapshot import Snapshot
from tests.support.process import configuration

CANARY = "hunter2"


def loaded(folder: Path, ledger: Any, **more: Any) -> Config:
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(configuration({"id": "m", "launch": {}}) | {"ledger": ledger} | more))
    return load(file, {"URL": f"postgresql://u:{CANARY}/@[::1]:5432/x?sslmode=require"})


def snapshot_of(config: Config) -> Snapshot:
    return build_snapshot(config, ObservedServers({}, {}, {}), 1, 0)


def test_a_url_alone_is_enough(tmp_path: Path) -> None:
    ledger = loaded(tmp_path, "sqlite:///usage.db").ledger
    assert ledger is not None and ledger.url.get_secret_value() == "sqlite:///usage.db"
    assert (ledger.retention, ledger.user, ledger.metadata) == (None, False, False)


@pytest.mark.parametrize("written", [{"env": "URL"}, {"url": {"env": "URL"}, "retention": "400d", "user": True}])
def test_a_password_comes_from_a_secret(tmp_path: Path, written: Any) -> None:
    config = loaded(tmp_path, written)
    assert config.ledger is not None and CANARY in config.ledger.url.get_secret_value() and CANARY not in repr(config)
    assert config.ledger.retention == (400 * 86400 if "url" in written else None)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("mysql://h/x", "ledger: expected a URL such as sqlite:///usage.db"),
        ("sqlite://usage.db", "ledger: expected a file after three slashes"),
        ("sqlite:///", "ledger: expected a file after three slashes"),
        ("postgresql://u@h:port/x", "ledger: expected a URL such as postgresql://user@host:5432/name"),
        (f"postgresql://u:{CANARY}@h/x", "ledger: passwords must not be in this file"),
        ({"url": f"postgresql://u:{CANARY}@h/x"}, "ledger.url: passwords must not be in this file"),
        ({"env": "NO_SUCH"}, "ledger: the environment variable NO_SUCH is not set"),
        ({"retention": "1d"}, "ledger.url: is missing"),
        ({"url": "sqlite:///x", "retention": 30}, "ledger.retention: expected a duration"),
        ({"url": "sqlite:///x", "usr": True}, "ledger.usr: unknown key; did you mean `user`?"),
        (7, "ledger: expected a mapping, found 7"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, written: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(tmp_path, written)
    (problem,) = map(str, caught.value.problems)
    assert message in problem and CANARY not in problem


def test_the_snapshot_has_the_settings_of_rows(tmp_path: Path) -> None:
    key = configuration()["keys"][0] | {
        "team": "research",
        "labels": {"cost_center": "17"},
        "user_header": "X-OpenWebUI-User-Id",
    }
    model = {"id": "m", "launch": {}, "price": {"prompt": 0.5, "completion": 2, "cached": 0.1}, "loras": [{"id": "m-sql", "path": "./l"}]}
    config = loaded(
        tmp_path,
        {"url": "sqlite:///x", "user": True, "bill_cancelled_prefill": True},
        keys=[key],
        teams=[{"id": "research"}],
        models=[model],
    )
    snapshot = snapshot_of(config)
    assert (snapshot.keys[0].team, snapshot.keys[0].labels) == ("research", {"cost_center": "17"})
    assert [each.user_header for each in snapshot.keys] == [b"x-openwebui-user-id"]
    assert [each.price for each in snapshot.models] == [Price(500_000_000, 2_000_000_000, 100_000_000, 2_000_000_000)] * 2
    assert (snapshot.ledger_user, snapshot.ledger_metadata, snapshot.bill_cancelled_prefill) == (True, False, True)
