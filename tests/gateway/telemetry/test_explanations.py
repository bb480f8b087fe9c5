"""The access log and the ledger explain a failed request without its response: the questions of docs/operators/troubleshooting.md."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2
import orjson
import pytest

from gateway.auth import keys
from gateway.telemetry.body_shape import field_path
from tests.support.ports import refusing
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY

LIMITED = "sk-a-key-with-a-limit"
NO_URLS = "This model takes no media from URLs. Send the media as a 'data:' URL, or ask the operator to allow the host."
WHOLE = "tokens_per_day of key limited: reserves 1,040 tokens, more than the whole 10 tokens per day"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with refusing() as port:
        down = {"id": "sim/down", "servers": [{"url": f"http://127.0.0.1:{port}"}]}
        config = configuration(launched(), down) | {"ledger": "sqlite:///usage.db"}
        config["keys"].append({"id": "limited", "hash": keys.hash_of(LIMITED), "limits": {"tokens_per_day": 10}})
        with gateway(tmp_path_factory.mktemp("gateway"), config) as one:
            assert posted(one, key=LIMITED).status_code == 200, "a request may use what is left of the limit"
            yield one


QUESTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "which model was not found": ({"model": "sim/onne"}, {"code": "model_not_found", "param": "model", "requested_model": "sim/onne"}),
    "which field was rejected by the policy": (
        {"prompt_logprobs": 1},
        {"code": "invalid_value", "param": "prompt_logprobs", "detail": "The field 'prompt_logprobs' is not allowed here."},
    ),
    "which value a field may have": (
        {"n": 5000},
        {"code": "invalid_value", "param": "n", "detail": "The field 'n' must be between 1 and 128."},
    ),
    "which field has the wrong type": (
        {"stream": "maybe"},
        {"code": "invalid_value", "param": "stream", "model": "sim/one", "detail": "The field 'stream' must be true or false."},
    ),
    "which field is out of range for the server": ({"temperature": -1}, {"code": "invalid_value", "param": "temperature"}),
    "where in the messages": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
        {"code": "invalid_value", "param": "messages.*.content.*.image_url", "detail": NO_URLS},
    ),
    "which template argument": (
        {"chat_template_kwargs": {"chat_template": "my text"}},
        {"code": "invalid_value", "param": "chat_template_kwargs.chat_template"},
    ),
    "what is missing": ({"model": None}, {"code": "missing_required_parameter", "param": "model"}),
    "which limit": (
        {"key": LIMITED},
        {"code": "insufficient_quota", "key": "limited", "detail": WHOLE},
    ),
    "which model has no server": ({"model": "sim/down"}, {"code": "no_healthy_server", "model": "sim/down"}),
    "whose key": ({"key": "sk-unknown"}, {"code": "invalid_api_key", "client": "127.0.0.1", "detail": "The API key is not valid."}),
    "what is wrong with the key": (
        {"key": '"sk-quoted"'},
        {"code": "invalid_api_key", "detail": "The API key is in quotes. Send it without them."},
    ),
}


def posted(one: Gateway, key: str = KEY, **body: Any) -> httpx2.Response:
    document = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], **body}
    return httpx2.post(f"{one.url}/v1/chat/completions", json=document, headers={"authorization": f"Bearer {key}"}, timeout=60)


def refused(one: Gateway, **body: Any) -> str:
    reply = posted(one, **body)
    assert reply.status_code >= 400, reply.text
    return str(reply.headers["x-request-id"])


def logged(one: Gateway, request_id: str) -> dict[str, Any]:
    line: str = wait_for(lambda: next((line for line in one.log.splitlines() if request_id in line), None))
    return dict(orjson.loads(line))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_log_alone_explains_an_error(running: Gateway, question: str) -> None:
    body, expected = QUESTIONS[question]
    line = logged(running, refused(running, **body))
    assert {name: line.get(name) for name in expected} == expected


def test_the_ledger_has_the_field_and_the_name_too(running: Gateway) -> None:
    request_id = refused(running, model="a\x00b\n" + "c" * 100)
    expected = ("model", "a?b?" + "c" * 60)
    assert logged(running, request_id)["requested_model"] == expected[1]

    def stored() -> tuple[str, str] | None:
        query = "SELECT param, requested_model FROM gateway_usage WHERE request_id = ?"
        with closing(sqlite3.connect(running.folder / "usage.db")) as database:
            row: tuple[str, str] | None = database.execute(query, (request_id,)).fetchone()
            return row

    assert wait_for(stored) == expected


def test_an_unknown_model_on_a_page_is_logged(running: Gateway) -> None:
    reply = httpx2.get(f"{running.url}/v1/models/none", headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    line = logged(running, reply.headers["x-request-id"])
    assert (line["code"], line["requested_model"]) == ("model_not_found", "none")


def test_a_path_has_names_of_the_tables_only() -> None:
    assert field_path("messages[0].content.secret text") == field_path("messages.0.content.x") == "messages.*.content.other"
    assert field_path("a" * 1000 + ".b" * 1000) == ".".join(["other"] * 6)
