"""Streams that outlast a drain are continued on other servers, with real processes: nothing is cut, and no drain waits for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2

from tests.support.controlled import Controlled, controlled
from tests.support.process import launched
from tests.support.running import until

A = "sim/a"
TOKENS, SPEED = 300, 10
"""The tokens of each response, and how many of them a server makes in a second."""


def replicated(count: int, **settings: Any) -> dict[str, Any]:
    model = launched(A, **{"sim-tokens": TOKENS, "sim-tokens-per-second": SPEED, "max-model-len": 4096})
    model["launch"]["replicas"] = count
    return {**model, "move_after": "200ms", **settings}


async def streams(one: Controlled, count: int) -> list[asyncio.Task[httpx2.Response]]:
    """Start greedy streams, and wait until each of them has an event."""
    bodies = [{"stream": True, "temperature": 0, "messages": [{"role": "user", "content": f"Question {n}"}]} for n in range(count)]
    tasks = [asyncio.create_task(one.request(A, **body)) for body in bodies]
    await until(lambda: one.in_flight(A) == count and one.value("time_to_first_token_seconds", A) == 0)
    return tasks


def text_of(reply: httpx2.Response) -> str:
    """Return the text of a complete stream."""
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text, reply.text[-500:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n")[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_a_rolling_restart_does_not_wait_for_long_streams_and_cuts_none(tmp_path: Path) -> None:
    async with controlled(tmp_path, replicated(3), drain="10m") as one:
        tasks = await streams(one, 9)
        await one.operations.restart(A)
        await until(lambda: one.launches(A) == 6 and one.state(A) == "ready", 90.0)
        left = sum(not task.done() for task in tasks)
        replies = await asyncio.gather(*tasks)
        texts = [text_of(reply) for reply in replies]
        assert left == 9
        assert len(set(map(len, texts))) >= 1
        print([len(each) for each in texts])
        assert one.value("incomplete_total", A, "upstream") == 0
