"""The model list: the fields that each kind of client reads, and its pages."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import orjson
import pytest

from gateway.api.errors import Refusal
from gateway.snapshot.link import Health
from gateway.snapshot.money import Price
from gateway.snapshot.snapshot import Model
from gateway.worker.model_list import card, cards, page
from tests.support.running import key, model, serving
from tests.support.wire import request, request_once
from upstream.balancing.server import Condition, ServerSpec
from upstream.http.address import Address

QWEN = Model("Qwen/big", (), aliases=("qwen", "default"), created=1_760_000_000)


def test_an_entry_has_the_fields_of_openai_and_anthropic() -> None:
    assert card(QWEN, Health({}, {})) == {
        "id": "Qwen/big", "object": "model", "created": 1_760_000_000, "owned_by": "vllm-gateway", "type": "model",
        "display_name": "Qwen/big", "created_at": "2025-10-09T08:53:20Z", "lifecycle": "active", "aliases": ["qwen", "default"],
        "status": {"value": "unloaded"},
    }, "what is not known is absent"  # fmt: skip


def test_the_context_length_has_the_names_that_clients_read() -> None:
    shown = card(QWEN, Health({}, {QWEN.id: 2048}))
    assert {shown[name] for name in ("max_model_len", "context_length", "context_window", "max_input_tokens")} == {2048}


@pytest.mark.parametrize(
    ("settings", "reported", "expected"),
    [
        ({}, None, {}),
        ({}, "embedding", {"task": "embedding"}),
        ({"task": "rerank"}, "classify", {"task": "rerank"}),
        ({"launched_with": ("structured_outputs", "tools")}, None, {}),
        ({"launched_with": ("structured_outputs", "tools")}, "embedding", {"task": "embedding"}),
        (
            {"launched_with": ("structured_outputs", "tools")},
            "chat",
            {"task": "chat", "supported_parameters": ["tools", "tool_choice", "structured_outputs", "response_format"]},
        ),
        (
            {"task": "chat", "capabilities": ("reasoning", "image"), "launched_with": ("tools",)},
            None,
            {
                "task": "chat",
                "supported_parameters": ["reasoning", "include_reasoning"],
                "architecture": {"input_modalities": ["text", "image"]},
            },
        ),
        ({"task": "embedding", "capabilities": ()}, None, {"task": "embedding", "architecture": {"input_modalities": ["text"]}}),
        (
            {"task": "transcription", "capabilities": ("audio",)},
            None,
            {"task": "transcription", "architecture": {"input_modalities": ["audio"]}},
        ),
    ],
)
def test_task_capabilities_and_parameters_of_a_model(settings: dict[str, Any], reported: str | None, expected: dict[str, Any]) -> None:
    shown = card(Model("m", (), **settings), Health({}, {}, tasks={"m": reported} if reported else {}))
    assert {name: shown[name] for name in ("task", "supported_parameters", "architecture") if name in shown} == expected


def test_an_alias_has_its_own_entry() -> None:
    listed = cards([QWEN, Model("sql", (), aliases=("s",), parent="Qwen/big")], Health({}, {QWEN.id: 2048}))
    assert [each["id"] for each in listed] == ["Qwen/big", "qwen", "default", "sql", "s"]
    assert [each.get("root") for each in listed] == [None, "Qwen/big", "Qwen/big", None, "sql"]
    assert [each.get("parent") for each in listed] == [None, None, None, "Qwen/big", "Qwen/big"]
    assert listed[1] == {**listed[0], "id": "qwen", "root": "Qwen/big", "aliases": []}


def test_prices_are_exact_and_those_of_one_token() -> None:
    shown = card(replace(QWEN, price=Price(200_000_000, 800_000_000, 1, 0)), Health({}, {}))
    assert shown["pricing"] == {
        "prompt": "0.0000002", "completion": "0.0000008", "input_cache_read": "0.000000000000001", "internal_reasoning": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("conditions", "seconds", "expected"),
    [
        ([Condition.DOWN, Condition.UP], None, {"value": "loaded"}),
        ([Condition.LOADING], 11.5, {"value": "loading", "retry_after": 12}),
        ([Condition.OUT_OF_ROTATION], 30, {"value": "unloaded", "retry_after": 30}),
        ([Condition.DOWN], None, {"value": "unloaded"}),
        ([Condition.LOADING], -5, {"value": "loading", "retry_after": 0}),
    ],
)
def test_the_state_of_a_model_and_its_adapters(conditions: list[Condition], seconds: float | None, expected: dict[str, Any]) -> None:
    servers = tuple(ServerSpec(f"s{number}", Address(port=1), "m") for number in range(len(conditions)))
    known = dict(zip((each.name for each in servers), conditions, strict=True))
    reported = Health(known, {}, {} if seconds is None else {"Qwen/big": time.monotonic() + seconds})
    for shown in (replace(QWEN, servers=servers), Model("sql", servers, parent="Qwen/big")):
        assert card(shown, reported)["status"] == expected
    assert "status" not in card(Model("either", (), split=(("Qwen/big", 1),)), reported)


ENTRIES = [{"id": name} for name in "abcde"]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "1000"}, "abcde", False),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"limit": "2", "before_id": "e"}, "cd", True),
        ({"limit": "2", "before_id": "c"}, "ab", False),
        ({"before_id": "a"}, "", False),
        ({"lifecycle": "active"}, "abcde", False),
    ],
)
def test_a_page(query: dict[str, str], ids: str, more: bool) -> None:
    shown = page(ENTRIES, query)
    assert ("".join(each["id"] for each in shown["data"]), shown["has_more"]) == (ids, more)
    assert (shown["first_id"], shown["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"limit": ""}, {"limit": "-1"}, {"after_id": "z"}, {"before_id": ""}]
)
def test_an_invalid_page_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(Refusal) as caught:
        page(ENTRIES, query)
    assert (caught.value.code, caught.value.param) == ("invalid_value", next(iter(query)))


def test_an_empty_list_has_no_first_and_no_last() -> None:
    assert page([], {}) == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


async def test_the_list_of_a_key_with_values_that_servers_report() -> None:
    models = [model(1, aliases=("t",)), model(2, identity="other")]
    async with serving(models, [key(models=("tiny",))]) as served:
        served.worker.apply_health(Health({"tiny#0": Condition.UP}, {"tiny": 2048, "other": 1}, tasks={"tiny": "embedding"}))
        reply = await request_once(served.port, request(b"", "/v1/models?limit=1", method="GET"))
        listed = orjson.loads(reply.body)
        assert [(each["id"], each["task"], each["context_length"]) for each in listed["data"]] == [("tiny", "embedding", 2048)]
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (True, "tiny", "tiny")
        reply = await request_once(served.port, request(b"", "/v1/models?limit=x", method="GET"))
        assert (reply.status, reply.error["param"]) == (400, "limit")
