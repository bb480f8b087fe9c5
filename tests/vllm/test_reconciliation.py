"""The real vLLM's counters are the ledger and the classes of the reconciliation, to the token."""

from __future__ import annotations

import http.client
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.process import configuration, gateway, wait_for
from tests.vllm.gateway import HEADERS, MODEL, Real, WorkUntil, attempted, chat
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.test_gateway_counts import CHAT, COMPLETIONS, ENDLESS
from tests.vllm.test_gateway_faults import option
from tests.vllm.test_prompt_count import prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

SAMPLES = "SELECT count(*) FROM gateway_engine_samples WHERE quiet"
COMPLETE = (
    (CHAT, chat("Who are you?", temperature=1, n=3, max_tokens=20)),
    (CHAT, chat("Who are you?", stream=True)),
    (COMPLETIONS, {"prompt": ["Once upon a time", "There was"], "max_tokens": 9}),
    ("/v1/messages", chat("Who are you?", max_tokens=20)),
    ("/v1/responses", {"input": "Who are you?", "max_output_tokens": 20}),
    ("/tokenize", {"prompt": "Who are you?"}),
)
TRUNCATED = (1, 1, 2)  # choices of each stream


def test_the_classes_are_what_the_real_engine_has_counted(real: Real, tmp_path: Path) -> None:
    """Complete responses, one with three choices, disconnects in the middle of streams, and one direct request."""

    def scenario(attempt: int) -> None:
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with sampling_gateway(real, folder) as beside:
            _check_classes(real, beside)

    attempted(scenario)


CANCELLED: dict[str, dict[str, Any]] = {
    CHAT: chat("Never stop.", max_tokens=ENDLESS, stream=True),
    "/v1/messages": chat("Never stop.", max_tokens=ENDLESS),
    "/v1/responses": {"input": "Never stop.", "stream": True},
    COMPLETIONS: {"prompt": "Never stop.", "max_tokens": ENDLESS},
}
"""Requests that are cancelled before their first event."""


def test_the_prompt_of_a_cancelled_request_is_charged_if_that_is_configured(real: Real, tmp_path: Path) -> None:
    with sampling_gateway(real, tmp_path, bill_cancelled_prefill=True) as beside:
        for path, body in CANCELLED.items():
            with real.held():
                _cancel(real, beside, path, body)
                # The engine must not continue before the gateway has noticed the disconnect.
                wait_for(lambda: beside.gateway.metric(f'vllm_gateway_inflight_requests{{model="{MODEL}"}}') == 0)
            wait_for(lambda: real.count("vllm:num_requests_running") == real.count("vllm:num_requests_waiting") == 0)
        columns = "endpoint, status, incomplete, prompt_tokens, completion_tokens, estimated_by"
        select = f"SELECT {columns} FROM gateway_usage"
        found = wait_for(lambda: len(query(tmp_path, select)) == len(CANCELLED) and query(tmp_path, select))
        expected = {
            (path, 499, "client", prompt_of(real, path, {**body, "stream": False}), 0, "tokenize") for path, body in CANCELLED.items()
        }
        assert set(found) == expected


def _cancel(real: Real, beside: Real, path: str, body: dict[str, Any]) -> None:
    """Send a request, and disconnect when the server has received it. The engine is held, so there is no event yet."""
    arrived = real.arrived()
    with closing(http.client.HTTPConnection("127.0.0.1", beside.gateway.data, timeout=60)) as connection:
        connection.request("POST", path, json.dumps({"model": MODEL, **body}), {**HEADERS, "content-type": "application/json"})
        wait_for(lambda: real.arrived() > arrived)


@contextmanager
def sampling_gateway(real: Real, folder: Path, **settings: Any) -> Iterator[Real]:
    """Run another gateway for the real vLLM, which samples its counters often. Yield it when the first sample is stored."""
    key = folder / "internal.key"
    key.write_text(real.internal_key)
    vllm = {"url": f"unix:{option(real.shim(), '--uds')}", "api_key": {"file": str(key)}}
    ledger = {"url": "sqlite:///usage.db", "sample_interval": "300ms", **settings}
    wait_for(lambda: real.count("vllm:num_requests_running") == 0)
    with gateway(folder, configuration({"id": MODEL, "servers": [vllm]}) | {"ledger": ledger}) as beside:
        wait_for(lambda: query(folder, SAMPLES)[0][0])
        yield Real(beside, real.folder)


def query(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / "usage.db")) as connection:
        exists = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'gateway_engine_samples'").fetchone()
        return connection.execute(statement).fetchall() if exists else [(0,)]


def counters(real: Real) -> tuple[float, float]:
    return real.count("vllm:prompt_tokens_total"), real.count("vllm:generation_tokens_total")


def _check_classes(real: Real, beside: Real) -> None:
    before = counters(real)
    with ThreadPoolExecutor(3) as pool:
        responses = [*pool.map(lambda each: beside.post(*each), COMPLETE)]
    assert {response.status_code for response in responses} == {200}
    direct = real.post_directly(CHAT, chat("What is the capital of France?", max_tokens=20))["usage"]
    truncated = _disconnect(real, beside)
    wait_for(lambda: real.count("vllm:num_requests_running") == 0)
    engine = tuple(after - earlier for after, earlier in zip(counters(real), before, strict=True))
    found = wait_for(lambda: reconciled(beside, engine), why=lambda: f"{reconciled(beside)}, not {engine}")
    prompt, completion = found["prompt"], found["completion"]
    assert (prompt["direct_use"], completion["direct_use"]) == (direct["prompt_tokens"], direct["completion_tokens"])
    [(again,)] = query(beside.gateway.folder, "SELECT sum(prompt_tokens * (choices - 1)) FROM gateway_usage WHERE choices > 1")
    assert (prompt["choices"], prompt["cancelled_prefill"], completion["choices"]) == (again, 0, 0)
    ledger = query(beside.gateway.folder, "SELECT sum(prompt_tokens), sum(completion_tokens) FROM gateway_usage")
    assert (prompt["ledger"], completion["ledger"]) == ledger[0]
    assert completion["not_delivered"] == engine[1] - ledger[0][1] - direct["completion_tokens"] >= 0
    for classes in (prompt, completion):
        assert classes["difference"] == classes["lost"] == classes["uncounted"] == classes["estimates"] == 0
    assert {name: count for name, count in found.items() if name.endswith(("in_progress", "unsampled"))} == {
        f"{kind}_{name}": 0 for kind in ("prompt", "completion") for name in ("in_progress", "unsampled")
    }
    assert truncated == len(TRUNCATED)


def reconciled(beside: Real, engine: tuple[float, ...] | None = None) -> dict[str, Any] | None:
    """Return the classes of the server once all rows are stored, and the samples contain what the engine has counted."""
    [(rows,)] = query(beside.gateway.folder, "SELECT count(*) FROM gateway_usage")
    since = datetime.fromtimestamp(0, UTC).isoformat()
    servers = beside.gateway.get(f"/usage?reconcile=true&since={since.replace('+00:00', 'Z')}").json()["servers"]
    found = dict(servers[0]) if servers else None
    if engine is None or found is None:
        return found
    is_complete = rows == len(COMPLETE) + len(TRUNCATED) and (found["prompt"]["engine"], found["completion"]["engine"]) == engine
    return found if is_complete else None


def _disconnect(real: Real, beside: Real) -> int:
    """Disconnect from streams while vLLM works on them. Return their number.

    Raises:
        NotAchieved: vLLM had finished the streams before.
    """
    bodies = [{"model": MODEL, **chat("Never stop.", stream=True, max_tokens=ENDLESS, temperature=1, n=choices)} for choices in TRUNCATED]

    def disconnect(work_until: WorkUntil) -> int:
        with ThreadPoolExecutor(len(bodies)) as pool:
            reading = [pool.submit(_read_some, beside.gateway.url + CHAT, body) for body in bodies]
            work_until(lambda: all(each.done() for each in reading))
        return len(reading)

    return real.disconnect_in_mid_response(disconnect, tokens=ENDLESS, gateway=beside.gateway)


def _read_some(url: str, body: dict[str, Any]) -> None:
    with httpx2.stream("POST", url, json=body, headers=HEADERS, timeout=120) as response:
        events = 0
        for piece in response.iter_raw():
            events += piece.count(b"\n\n")
            if events >= 6:
                break
