"""Queries while the ledger runs, in both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway import config as conf
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.spool import spool
from gateway.ledger.writer import running
from gateway.usage.errors import QueryError
from gateway.usage.reader import UsageReader
from tests.gateway.ledger.rows import payload
from tests.support.money import price
from tests.support.process import configuration, wait_for, write


async def test_queries_while_the_ledger_runs(url: str, tmp_path: Path) -> None:
    settings = conf.Ledger.model_validate({"url": SecretStr(url)})
    with running(settings, tmp_path, spool(tmp_path / "spool"), workers=1) as one:
        reader = UsageReader(one.engine)
        one.journals[0].append(payload(1, started=datetime.now(UTC).timestamp(), price=price(1.0, 1.0)))
        wait_for(lambda: one.written == 1)
        tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        document = await reader.report({"by": "key", "until": tomorrow})
        (only,) = document["usage"]
        assert (only["key"], only["prompt_tokens"], bytes(only["cost"])) == ("team-a", 10, b"0.000015")
        with pytest.raises(QueryError, match="color"):
            await reader.report({"by": "color"})


async def test_queries_while_the_database_is_unavailable(tmp_path: Path) -> None:
    write(tmp_path / "gateway.yaml", configuration({"id": "m", "launch": {}}))
    settings = conf.Ledger.model_validate({"url": SecretStr("sqlite:///missing/usage.db")})
    with running(settings, tmp_path, spool(tmp_path / "spool"), workers=1) as one:
        reader = UsageReader(one.engine)
        for query in ({"by": "key"}, {"reconcile": "true"}):
            with pytest.raises(DatabaseUnavailableError, match="unable to open database file"):
                await reader.report(query)
        last_use = await reader.last_use(["team-a"], frozenset())
    assert last_use.unknown == "the ledger's database does not respond: unable to open database file"
