"""The databases of people, and a gateway with an honest and a hostile issuer, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.gateway.sign_in.ports import Ports, entry, ports
from tests.support.databases import server, url
from tests.support.oidc_issuer import OidcIssuer, oidc_issuer

__all__ = ["server", "url"]


@pytest.fixture
def issuer() -> Iterator[OidcIssuer]:
    with oidc_issuer() as running:
        yield running


@pytest.fixture
def other() -> Iterator[OidcIssuer]:
    """A second issuer, which attacks the first one. It is configured, and grants teams only."""
    with oidc_issuer() as running:
        yield running


@pytest.fixture
async def gateway(tmp_path: Path, issuer: OidcIssuer, other: OidcIssuer) -> AsyncIterator[Ports]:
    hostile = entry(other, "two", claims={"roles": None})
    async with ports(tmp_path, entry(issuer, name="The <b>first</b>"), hostile) as running:
        yield running


@pytest.fixture
async def browser(gateway: Ports) -> AsyncIterator[httpx2.AsyncClient]:
    async with gateway.browser() as made:
        yield made
