"""The routes that need no model server: their methods, their keys, and a trailing slash."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from gateway import __version__
from tests.support.running import KEY, key, model, serving, until
from tests.support.wire import Client, request, request_once


@pytest.mark.parametrize("path", ["/version", "/version/"])
async def test_the_version_requires_a_key(path: str) -> None:
    """vLLM's clients read the field ``version``. An unauthenticated client could use it to choose an exploit."""
    async with serving([model(1)]) as served:
        reply = await request_once(served.port, request(b"", path, method="GET"))
        assert (reply.status, orjson.loads(reply.body)) == (200, {"version": __version__})
        refused = await request_once(served.port, request(b"", path, method="GET", token=None))
        assert (refused.status, refused.error["code"]) == (401, "missing_api_key")
        assert __version__.encode() not in refused.body
        await until(lambda: served.total("requests_total") == 2)
        assert served.value("requests_total", "other", "/version", "200") == 1


async def test_the_version_needs_no_key_if_anonymous_requests_are_allowed() -> None:
    async with serving([model(1)], [key(token=KEY), key("all", "-", anonymous=True)]) as served:
        assert (await request_once(served.port, request(b"", "/version", method="GET", token=None))).status == 200


@pytest.mark.parametrize("path", ["/health", "/health/", "/v1/models", "/v1/models/", "/i-1/v1/models/"])
async def test_a_trailing_slash_changes_nothing(path: str) -> None:
    async with serving([model(1, mounts=("/i-1",))], docs=True) as served:
        assert (await request_once(served.port, request(b"", path, method="GET"))).status == 200


@pytest.mark.parametrize("path", ["/health/", "/version", "/v1/models/", "/openapi.json"])
async def test_a_wrong_method_is_a_405(path: str) -> None:
    async with serving([model(1)], docs=True) as served:
        reply = await request_once(served.port, request(b"", path, method="DELETE"))
        assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "GET")


async def test_a_method_that_no_route_has_is_a_405() -> None:
    async with serving([model(1)]) as served:
        reply = await request_once(served.port, request(b"", "/v1/models", method="PROPFIND"))
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
        assert "PROPFIND" in str(reply.error["message"])


async def test_a_client_on_a_unix_socket_has_no_address_in_the_log(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    async with serving([model(1)]) as served:
        async with await asyncio.get_running_loop().create_unix_server(served.worker.connection, path):
            one = Client(*await asyncio.open_unix_connection(path))
            assert (await one.request(request(b"", "/health", method="GET"))).status == 200
            one.disconnect()
            await until(lambda: not served.connections and len(served.context.records) == 1)
        assert served.context.records[0].client is None
