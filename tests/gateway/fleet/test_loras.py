"""LoRA adapters: each has its own name for clients, keys and metrics, and uses the servers of its base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gateway.auth import keys
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY

LIMITED = "sk-for-the-adapter"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    loras = [{"id": "sim/sql", "path": "/loras/sql", "aliases": ["sql"]}, {"id": "sim/chat", "path": "/loras/chat"}]
    config = configuration(launched() | {"loras": loras, "aliases": ["one"]})
    config["keys"].append({"id": "team-b", "hash": keys.hash_of(LIMITED), "models": ["sim/sql"]})
    with gateway(tmp_path_factory.mktemp("gateway"), config) as one:
        yield one


def get(running: Gateway, path: str, key: str) -> httpx2.Response:
    return httpx2.get(running.url + path, headers={"authorization": f"Bearer {key}"}, timeout=30)


@pytest.mark.parametrize(
    ("requested", "adapter"), [("sim/sql", "sim/sql"), ("sql", "sim/sql"), ("sim/chat", "sim/chat"), ("one", "sim/one")]
)
def test_each_name_reaches_its_adapter_on_the_server_of_the_base(running: Gateway, requested: str, adapter: str) -> None:
    response = running.request(model=requested)
    assert (response.status_code, response.json()["model"]) == (200, adapter)
    line = f'vllm_gateway_requests_total{{code="200",endpoint="/v1/chat/completions",error="",model="{adapter}"}}'
    wait_for(lambda: running.metric(line) >= 1)  # a request is counted when it has finished, shortly after its response


def test_the_list_of_models_names_the_base(running: Gateway) -> None:
    cards = {card["id"]: card for card in get(running, "/v1/models", KEY).json()["data"]}
    assert list(cards) == ["sim/one", "one", "sim/sql", "sql", "sim/chat"]
    assert "parent" not in cards["sim/one"] and cards["sim/sql"]["parent"] == cards["sim/chat"]["parent"] == "sim/one"
    assert cards["sim/sql"]["max_model_len"] == cards["sim/one"]["max_model_len"] > 0
    assert "/loras" not in str(cards), "paths of the server are not shown"


def test_a_key_may_be_limited_to_an_adapter(running: Gateway) -> None:
    assert [card["id"] for card in get(running, "/v1/models", LIMITED).json()["data"]] == ["sim/sql", "sql"]
    headers = {"authorization": f"Bearer {LIMITED}"}
    for name, status in (("sim/sql", 200), ("sim/one", 404), ("sim/chat", 404)):
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
        assert httpx2.post(running.url + "/v1/chat/completions", json=body, headers=headers, timeout=30).status_code == status


def test_requests_in_flight_count_for_the_server_of_the_base(running: Gateway) -> None:
    text = running.get("/metrics").text
    assert 'vllm_gateway_server_inflight{model="sim/one",server="sim/one#0"}' in text
    assert 'vllm_gateway_server_inflight{model="sim/sql"' not in text
    wait_for(lambda: 'vllm_gateway_inflight_requests{model="sim/sql"} 0.0' in running.get("/metrics").text)


def test_an_adapter_of_a_server_that_the_gateway_does_not_launch_is_requested_by_its_id(running: Gateway, tmp_path: Path) -> None:
    found = {"id": "far", "servers": [{"url": running.url, "model": "one", "api_key": {"file": "key"}}], "loras": [{"id": "sim/sql"}]}
    (tmp_path / "key").write_text(KEY)
    with gateway(tmp_path, configuration(found)) as second:
        assert [second.request(model=name).json()["model"] for name in ("far", "sim/sql")] == ["sim/one", "sim/sql"]
