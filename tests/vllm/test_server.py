"""The guarantees of `running`: a healthy server inside the block, no process afterwards, and an error message if the start fails."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.vllm.server import NOT_INSTALLED, POOLING, NotStarted, alive, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]


def test_pooling_routes_respond_on_a_unix_socket_and_nothing_is_left(tmp_path: Path) -> None:
    with running("qwen3", flags=POOLING, uds=tmp_path / "vllm.sock") as server:
        transport = httpx2.HTTPTransport(uds=str(server.uds))
        with httpx2.Client(base_url=server.url, transport=transport, timeout=120) as client:
            embedded = client.post("/v1/embeddings", json={"model": "tiny", "input": ["Once", "upon a time"]}).json()
            ranked = client.post("/v1/rerank", json={"model": "tiny", "query": "Once", "documents": ["upon", "a time"]}).json()
    assert [len(each["embedding"]) for each in embedded["data"]] == [128, 128]
    assert {each["index"] for each in ranked["results"]} == {0, 1}
    assert not alive(server.pid)


def test_a_server_that_ends_at_once_says_why() -> None:
    with pytest.raises(NotStarted, match="no-such-flag"), running("qwen3", flags={"no-such-flag": True}):
        pass
