"""The addresses of clients, and the number of their connections."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.client.addresses import ConnectionCounts, Proxies, shown_address
from gateway.snapshot.snapshot import Clients
from gateway.system.addresses import counted_client
from tests.support.rows import each_row
from tests.support.running import model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, client, request, request_once

PROXIES = Proxies(("10.0.0.0/8", "2001:db8::/32", "::1"))


@each_row(
    ("forwarded", "client_address"),
    [
        ("", "10.0.0.1"),
        ("192.0.2.7", "192.0.2.7"),
        ("1.1.1.1, 192.0.2.7", "192.0.2.7"),
        ("192.0.2.7, 10.1.1.1", "192.0.2.7"),
        ("192.0.2.7,10.1.1.1 ,\t2001:db8::5", "192.0.2.7"),
        ("10.9.9.9, 10.1.1.1", "10.9.9.9"),
        ("1.1.1.1, unknown, 10.1.1.1", "10.1.1.1"),
        ("1.1.1.1, ", "10.0.0.1"),
        ("127.0.0.1' OR 1=1", "10.0.0.1"),
        ("192.0.2.7:4711", "192.0.2.7"),
        ("[2a00::1]:4711", "2a00::1"),
        ("2a00::1", "2a00::1"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("1.1.1.1, ::ffff:10.1.1.1", "1.1.1.1"),
        ("\xff\xfe", "10.0.0.1"),
    ],
)
def test_the_rightmost_address_that_is_not_trusted_counts(forwarded: str, client_address: str) -> None:
    assert PROXIES.client("10.0.0.1", forwarded.encode("latin-1")) == client_address


def test_trusted_proxies() -> None:
    assert PROXIES.trusts("10.255.0.1") and PROXIES.trusts("::1") and PROXIES.trusts("::ffff:10.0.0.1")
    assert not PROXIES.trusts("11.0.0.1") and not PROXIES.trusts("") and not PROXIES.trusts("::2")
    assert not Proxies(()).trusts("10.0.0.1")


def test_what_counts_as_one_client() -> None:
    assert counted_client("192.0.2.7") == "192.0.2.7"
    assert counted_client("2a00:1::1") == counted_client("2a00:1::ffff:1") != counted_client("2a00:1:0:1::1")
    assert shown_address("::ffff:192.0.2.7") == "192.0.2.7" and shown_address("somewhere") == "somewhere"


def test_counting_leaves_nothing_behind() -> None:
    connections = ConnectionCounts()
    assert [connections.add("a", 2) for _ in range(3)] == [True, True, False]
    assert connections.add("b", 2) and len(connections) == 3
    for each in ("a", "b", "a"):
        connections.remove(each)
    assert len(connections) == 0 and connections.add("a", 1)


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


@pytest.mark.parametrize(
    ("trusted", "client_address"), [((), "127.0.0.1"), (("127.0.0.0/8",), "192.0.2.7"), (("192.0.2.0/24",), "127.0.0.1")]
)
async def test_the_client_is_in_the_record_and_not_sent_to_servers(trusted: tuple[str, ...], client_address: str) -> None:
    extra = ("x-forwarded-for: 1.1.1.1", "x-forwarded-for: 192.0.2.7, 127.0.0.1")
    async with scripted(respond) as server, serving([model(server.port)], clients=Clients(trusted_proxies=trusted)) as served:
        assert (await request_once(served.port, request(extra=extra))).status == 200
        assert (await request_once(served.port, request(b"", "/v1/models", method="GET", extra=extra))).status == 200
        await until(lambda: len(served.context.records) == 2)
        assert [record.client for record in served.context.records] == [client_address, client_address]
        assert b"forwarded" not in server.requests[0].head.lower() and b"192.0.2.7" not in server.requests[0].head


async def test_connections_of_one_address_are_bounded() -> None:
    async with scripted(respond) as server, serving([model(server.port)], clients=Clients(max_per_address=3)) as served:
        async with AsyncExitStack() as stack:
            held = [await stack.enter_async_context(client(served.port)) for _ in range(3)]
            for one in held:
                assert (await one.request(request())).status == 200
            for sends in (False, True):
                async with client(served.port) as fourth, asyncio.timeout(30):
                    if sends:
                        fourth.send(request())
                    reply = await fourth.reply()
                    assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
                    assert reply.headers["connection"] == "close" and reply.headers["retry-after"] == "1"
                    assert await fourth.closed()
            assert server.requests[3:] == []
            assert served.value("client_faults_total", "too_many") == 2
            assert (await held[0].request(request())).status == 200
        await until(lambda: not len(served.worker.connections.addresses))
        assert (await request_once(served.port, request())).status == 200


async def test_a_trusted_proxy_may_have_any_number() -> None:
    clients = Clients(max_per_address=1, trusted_proxies=("127.0.0.1",))
    async with scripted(respond) as server, serving([model(server.port)], clients=clients) as served, AsyncExitStack() as stack:
        for _ in range(5):
            one = await stack.enter_async_context(client(served.port))
            assert (await one.request(request())).status == 200
