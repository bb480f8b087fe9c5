"""Requests for a key's own usage, which control answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.api.errors import Refusal
from gateway.snapshot.link import UsageReported
from gateway.snapshot.snapshot import Key
from gateway.worker.query_requests import UsageRequests
from tests.support.running import until

AT_ONCE = 64


async def test_requests_that_wait_for_control_are_bounded() -> None:
    sent: list[Any] = []
    requests = UsageRequests(sent.append)
    waiting = [asyncio.create_task(requests.report(Key(f"key-{number}"), {"period": "day"})) for number in range(AT_ONCE)]
    await until(lambda: len(sent) == AT_ONCE)
    with pytest.raises(Refusal, match="Too many clients are reading their usage") as refused:
        await requests.report(Key("key"), {})
    assert refused.value.code == "overloaded" and len(sent) == AT_ONCE
    for each in reversed(sent):
        requests.reply(UsageReported(each.number, each.key.encode()))
    assert await asyncio.gather(*waiting) == [b"key-%d" % number for number in range(AT_ONCE)]
    assert (sent[0].key, sent[0].parameters) == ("key-0", {"period": "day"})


async def test_a_reply_for_a_client_that_has_disconnected_is_ignored() -> None:
    sent: list[Any] = []
    requests = UsageRequests(sent.append)
    gone, waits = (asyncio.create_task(requests.report(Key(key), {})) for key in ("gone", "waits"))
    await until(lambda: len(sent) == 2)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    for each in sent:
        requests.reply(UsageReported(each.number, b"usage of " + each.key.encode()))
    assert await waits == b"usage of waits"


async def test_an_error_of_control_is_the_clients_error() -> None:
    sent: list[Any] = []
    requests = UsageRequests(sent.append)
    waits = asyncio.create_task(requests.report(Key("key"), {}))
    await until(lambda: sent)
    requests.reply(UsageReported(sent[0].number, error="overloaded", text="The ledger is busy.", wait=1.2))
    with pytest.raises(Refusal, match="The ledger is busy") as refused:
        await waits
    assert (refused.value.code, refused.value.headers["retry-after"]) == ("overloaded", "2")
