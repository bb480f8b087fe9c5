"""Keys in front of a real vLLM: the salt separates their caches, every route accepts the priority, and servers require their own keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from gateway.auth.keys import hash_of
from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.support.shared import Shared
from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import WITHOUT_THINKING
from tests.vllm.server import NOT_INSTALLED, Flag, Server, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

SLOTS = 32
SERVER_KEY = "sk-engine-1"
FLAGS: Mapping[str, Flag] = {
    "block-size": 32,
    "scheduling-policy": "priority",
    "max-num-seqs": SLOTS,
    "enable-prompt-tokens-details": True,
    "reasoning-parser": "qwen3",
}
KEYS = {"one": "sk-one", "two": "sk-two"}
LONG = " ".join(f"Item {number} of the list is {number * number}." for number in range(16))


@contextmanager
def prioritized(folder: Path) -> Iterator[Server]:
    """Run a vLLM that orders its queue by priority, and accepts two keys from a file, like the chart's Secret."""
    (folder / "vllm.yaml").write_text(f'api-key: ["{SERVER_KEY}", "0123"]\n')
    with running("qwen3", flags={**FLAGS, "config": str(folder / "vllm.yaml")}) as server:
        yield server


@pytest.fixture(scope="module", params=["@priority"])
def one(shared: Shared, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "secret").write_text("of the salts")
    (folder / "server-key").write_text(SERVER_KEY)
    server = shared.once(request.param, lambda: prioritized(folder))
    assert SERVER_KEY not in Path(f"/proc/{server.pid}/cmdline").read_text() + server.log.read_text()
    served = {"url": server.url, "model": "tiny", "api_key": {"file": "server-key"}}
    config = configuration({"id": "tiny", "servers": [served]})
    config["keys"] = [{"id": name, "hash": hash_of(token), "priority": -5} for name, token in KEYS.items()]
    config["isolate_prefix_cache"] = {"secret": {"file": "secret"}}
    with gateway(folder, config) as running_gateway:
        yield running_gateway


def post(one: Gateway, key: str, path: str, **body: object) -> Json:
    response = httpx2.post(one.url + path, json={"model": "tiny", **body}, headers={"authorization": f"Bearer {KEYS[key]}"}, timeout=120)
    assert response.status_code == 200, response.text
    document: Json = response.json()
    return document


def cached(one: Gateway, key: str, text: str, **more: object) -> int:
    """Return the number of cached prompt tokens."""
    response = post(one, key, "/v1/chat/completions", messages=[user(text)], max_tokens=4, **WITHOUT_THINKING, **more)
    return int((response["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_keys_do_not_share_the_cache_and_cannot_choose_to(one: Gateway) -> None:
    assert cached(one, "one", LONG) == 0
    assert cached(one, "one", LONG) > 100
    assert cached(one, "two", LONG) == 0
    salt = {"cache_salt": "of my choice"}
    assert cached(one, "one", f"Again: {LONG}", **salt) == cached(one, "two", f"Again: {LONG}", **salt) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user("Hi")], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [user("Hi")], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [user("Hi")]}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
def test_every_route_takes_what_a_key_brings(one: Gateway, path: str, body: Json) -> None:
    assert post(one, "one", path, **body)


def test_a_server_with_two_keys_serves_during_a_key_change_and_a_server_that_refuses_the_key_is_down(one: Gateway) -> None:
    file = one.folder / "server-key"

    def key(text: str) -> None:
        file.write_text(text)
        assert one.command("reload").returncode == 0

    def reason() -> str:
        return str(one.get("/status").json()["models"][0]["servers"][0]["reason"])

    assert cached(one, "one", "Before.") == 0
    key("0123")
    assert cached(one, "one", "Between.") == 0
    try:
        key("unknown")
        wait_for(lambda: reason().startswith("the server rejected the gateway's key"), 60)
    finally:
        key("0123")
    wait_for(lambda: not reason(), 60)
    assert cached(one, "one", "After.") == 0
