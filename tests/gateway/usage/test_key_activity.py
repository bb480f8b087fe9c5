"""When each entry of keys was used last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from gateway.cli.main import run
from gateway.ledger.store import UsageStore, database_url
from gateway.usage.key_activity import last_use
from tests.gateway.ledger.rows import STARTED, row
from tests.support.process import configuration

DAY = 86400.0
ROWS = [
    row(1, started=STARTED - DAY),
    row(2, started=STARTED),
    row(3, started=STARTED - 2 * DAY),
    row(4, key="s_x/alice", started=STARTED - 3 * DAY),
    row(5, key="s_x/bob", started=STARTED - 4 * DAY),
    row(6, key="sax/carol", started=STARTED),
    row(7, key="s_x", started=STARTED - 9 * DAY),
]


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        yield made


def test_last_use(store: UsageStore) -> None:
    keys = ["team-a", "s_x", "unused"]
    assert last_use(store.engine, keys, frozenset()) == {}, "a ledger that has had no row has no table"
    store.write(ROWS)
    moment = datetime.fromtimestamp(STARTED, UTC)
    days_ago = {key: (moment - when).days for key, when in last_use(store.engine, keys, frozenset({"s_x"})).items()}
    assert days_ago == {"team-a": 0, "s_x": 3}
    assert (moment - last_use(store.engine, keys, frozenset())["s_x"]).days == 9, "subjects are a token's alone"


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        (None, "the last use is unknown: no ledger is configured"),
        ("sqlite:///usage.db", "the last use is unknown: the ledger's database does not exist yet"),
        ("sqlite:///spoiled.db", "the last use is unknown: the ledger's database does not respond: "),
    ],
)
def test_the_reason_for_an_unknown_last_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], ledger: str | None, message: str) -> None:
    (tmp_path / "spoiled.db").write_bytes(b"no database" * 500)
    config = configuration({"id": "m", "launch": {}}) | ({"ledger": ledger} if ledger else {})
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(config))
    assert run(["keys", "list", "--config", str(tmp_path / "gateway.yaml")]) == 0
    printed = capsys.readouterr()
    assert message in printed.err and "team-a" in printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway.yaml", "spoiled.db"]
