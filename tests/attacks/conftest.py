"""A gateway with an honest and a hostile issuer, and the databases of the store."""

from __future__ import annotations

from tests.gateway.sign_in.conftest import browser, gateway, issuer, other
from tests.gateway.store.conftest import database
from tests.support.databases import server, url

__all__ = ["browser", "database", "gateway", "issuer", "other", "server", "url"]
