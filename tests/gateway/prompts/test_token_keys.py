"""Requests reach the server that has their tokens cached by its KV cache events."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest

from gateway.prompts.token_keys import MOST_BYTES
from gateway.snapshot.link import BlockChanges, CachedBlocks
from gateway.snapshot.snapshot import BodyRules
from tests.support.running import KEY, Served, model, serving
from tests.support.scripted import Conversation, Scripted, scripted
from upstream.vllm.kv_events.keys import prompt_keys

SIZE = 16
REFUSED = "no tokens: "
"""The start of a text for which the servers return no token IDs."""


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


async def respond(talk: Conversation) -> None:
    """Respond as a server whose tokens are bytes."""
    document: Any = talk.request.json
    text = document.get("prompt") or document["messages"][0]["content"]
    ids = text if isinstance(text, list) else tokens_of(text)
    if talk.request.head.startswith(b"POST /tokenize ") and text.startswith(REFUSED):
        await talk.respond(b"{}", "500 Internal Server Error")
    elif talk.request.head.startswith(b"POST /tokenize "):
        await talk.respond(json.dumps({"count": len(ids), "max_model_len": 4096, "tokens": ids}).encode())
    else:
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        await talk.respond(json.dumps({"port": talk.writer.get_extra_info("sockname")[1], "usage": usage}).encode())


class Routed:
    """A worker, and three servers that publish events."""

    def __init__(self, worker: Served, servers: list[Scripted]) -> None:
        self.worker = worker
        self.servers = servers

    def report(self, number: int, ids: list[int], salt: str | None = None, *, size: int = SIZE, complete: bool = True) -> None:
        keys = array("Q", prompt_keys(ids, SIZE, salt=salt)).tobytes()
        self.worker.worker.apply_cached_blocks(CachedBlocks((BlockChanges(f"tiny#{number}", size, complete, False, b"", keys),)))

    async def server_of(self, path: str = "/v1/chat/completions", **body: Any) -> int:
        async with httpx2.AsyncClient() as client:
            headers = {"authorization": f"Bearer {KEY}"}
            response = await client.post(self.worker.url + path, json={"model": "tiny", **body}, headers=headers)
        assert response.status_code == 200
        return [server.port for server in self.servers].index(response.json()["port"])

    def tokenized(self) -> int:
        return sum(request.head.startswith(b"POST /tokenize ") for server in self.servers for request in server.requests)

    def predicted(self) -> int:
        explanation = self.worker.context.records[-1].explanation
        assert explanation is not None
        predicted: int = explanation["predicted_cached_tokens"]
        return predicted


@pytest.fixture
async def routed() -> AsyncIterator[Routed]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(scripted(respond)) for _ in range(3)]
        ports = [server.port for server in servers]
        settings = model(*ports, balance="cost", policy={"explain": True}, body=BodyRules(("cache_salt",)))
        yield Routed(await stack.enter_async_context(serving([settings])), servers)


TEXT = "The quick brown fox jumps over the lazy dog. " * 4
MESSAGES = [{"role": "user", "content": TEXT}]


async def test_without_events_no_token_ids_are_requested(routed: Routed) -> None:
    await routed.server_of(messages=MESSAGES)
    assert routed.tokenized() == 0


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_chat_reaches_the_server_that_has_its_tokens(routed: Routed, number: int) -> None:
    routed.report(number, tokens_of(TEXT))
    assert await routed.server_of(messages=MESSAGES) == number
    assert routed.predicted() == (len(TEXT) - 1) // SIZE * SIZE
    assert routed.tokenized() == 1


async def test_token_ids_of_the_request_are_used(routed: Routed) -> None:
    routed.report(1, tokens_of(TEXT))
    assert await routed.server_of("/v1/completions", prompt=tokens_of(TEXT)) == 1
    assert routed.tokenized() == 0


async def test_a_salt_has_separate_blocks(routed: Routed) -> None:
    routed.report(0, tokens_of(TEXT), "red")
    routed.report(2, tokens_of(TEXT), "blue")
    assert await routed.server_of(messages=MESSAGES, cache_salt="blue") == 2
    assert await routed.server_of(messages=MESSAGES, cache_salt="red") == 0
    await routed.server_of(messages=MESSAGES)
    assert routed.predicted() == 0


async def test_reported_blocks_count_more_than_the_requests_before(routed: Routed) -> None:
    first = await routed.server_of(messages=[{"role": "user", "content": TEXT * 10}])
    other = (first + 1) % 3
    for number in range(3):
        routed.report(number, tokens_of(TEXT * 10) if number == other else [1] * 20)
    assert await routed.server_of(messages=[{"role": "user", "content": TEXT * 10}]) == other


async def test_incomplete_reports_do_not_hide_the_requests_before(routed: Routed) -> None:
    home = await routed.server_of(messages=[{"role": "user", "content": TEXT * 10}])
    for number in range(3):
        routed.report(number, [1] * 20, complete=False)
    assert await routed.server_of(messages=[{"role": "user", "content": TEXT * 10}]) == home
    assert routed.predicted() > 1000


async def test_a_large_body_is_compared_by_its_text(routed: Routed) -> None:
    routed.report(0, tokens_of(TEXT))
    await routed.server_of(messages=[{"role": "user", "content": "x" * MOST_BYTES}])
    assert routed.tokenized() == 0


async def test_a_chat_with_an_image_is_compared_by_its_text(routed: Routed) -> None:
    """The server would load the image for its token IDs and again for the request."""
    routed.report(0, tokens_of(TEXT))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    await routed.server_of(messages=[{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}])
    assert routed.tokenized() == 0


async def test_a_chat_is_served_if_its_token_ids_cannot_be_read(routed: Routed) -> None:
    routed.report(0, tokens_of(TEXT))
    for _ in range(2):
        await routed.server_of(messages=[{"role": "user", "content": REFUSED + TEXT * 10}])
    assert routed.tokenized() == 2
    assert routed.predicted() > 0, "the second request is compared by its text"


async def test_blocks_of_a_removed_server_are_ignored(routed: Routed) -> None:
    routed.worker.worker.apply_cached_blocks(CachedBlocks((BlockChanges("removed#0", SIZE, True, False, b"", b""),)))
    await routed.server_of(messages=MESSAGES)
    assert routed.tokenized() == 0
