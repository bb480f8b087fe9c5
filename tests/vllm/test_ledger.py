"""The ledger's rows are the real vLLM's own count, to the token, for every answer that was whole; and say so where one was not."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx2
import pytest

from tests.support.process import wait_for
from tests.vllm.gateway import HEADERS, Real, chat
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.test_gateway_counts import CHAT, MIXED, counts, difference, usage, wait_until_nothing_is_in_flight

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED), pytest.mark.timeout(600)]


def rows(real: Real, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of these requests, once all are there."""

    def found() -> dict[str, dict[str, Any]]:
        with closing(sqlite3.connect(real.gateway.folder / "usage.db")) as connection:
            connection.row_factory = sqlite3.Row
            every = (dict(each) for each in connection.execute("SELECT * FROM gateway_usage"))
            return {each["request_id"]: each for each in every if each["request_id"] in ids}

    wait_for(lambda: len(found()) == len(ids))
    return found()


def test_a_mixed_run_is_in_the_ledger_as_vllm_counted_it(real: Real) -> None:
    before = counts(real)
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda each: real.post(*each), 2 * MIXED), real.post(CHAT, chat("Who are you?", temperature="hot"))]
    kept = rows(real, [answer.headers["x-request-id"] for answer in answers])
    for answer in answers[:-1]:
        row = kept[answer.headers["x-request-id"]]
        assert (row["status"], row["incomplete"], row["estimated"]) == (200, None, 0)
        assert (row["prompt_tokens"], row["completion_tokens"]) == usage(real.recorded(answer).said)
    refused = kept[answers[-1].headers["x-request-id"]]
    assert (refused["status"], refused["prompt_tokens"]) == (400, None)
    ledger = tuple(float(sum(row[f"{kind}_tokens"] or 0 for row in kept.values())) for kind in ("prompt", "completion"))
    wait_for(lambda: difference(before[0], counts(real)[0]) == ledger)
    assert difference(before[1], counts(real)[1]) == ledger


def test_a_stream_that_its_client_leaves_is_an_estimate(real: Real) -> None:
    """At least the pieces that passed, and never more than the engine made."""
    made = real.count("vllm:generation_tokens_total")
    request = {"model": "tests/tiny", **chat("Never stop.", stream=True, max_tokens=1900)}
    with real.held() as work_until, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(_leave_after, 5, real.gateway.url + CHAT, request)
        work_until(reading.done)
        identity = reading.result()
        wait_until_nothing_is_in_flight(real)
    row = rows(real, [identity])[identity]
    assert (row["status"], row["incomplete"], row["estimated"], row["prompt_tokens"]) == (499, "client", 1, None)
    wait_for(lambda: real.count("vllm:num_requests_running") == 0)
    assert 0 <= row["completion_tokens"] <= real.count("vllm:generation_tokens_total") - made


def _leave_after(events: int, url: str, request: dict[str, Any]) -> str:
    """Read so many events, then leave; the request's id."""
    with httpx2.stream("POST", url, json=request, headers=HEADERS, timeout=120) as answer:
        seen = 0
        for piece in answer.iter_raw():
            seen += piece.count(b"\n\n")
            if seen >= events:
                break
        return str(answer.headers["x-request-id"])
