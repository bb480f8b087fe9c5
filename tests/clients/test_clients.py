"""Client packages of application developers, used as documented, against a gateway with a simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.overloaded import TEXT
from tests.clients.visit import BUSY, MODEL, Client, Visit, visiting
from tests.support.process import wait_for

OPENAI = ("openai.AuthenticationError", "openai.NotFoundError", "openai.BadRequestError")
LITELLM = ("litellm.AuthenticationError", "litellm.NotFoundError", "litellm.ContextWindowExceededError")
ANTHROPIC = ("anthropic.AuthenticationError", "anthropic.NotFoundError", "anthropic.BadRequestError")
CLIENTS = (
    Client("openai", None, "use_openai", OPENAI, reports_code=True),
    Client("openai-1", "older", "use_openai", OPENAI, reports_code=True),
    Client("openai-2", "litellm", "use_openai", OPENAI, reports_code=True),
    Client("openai-node", None, "use_openai.mjs", OPENAI, reports_code=True),
    Client("anthropic", "current", "use_anthropic", ANTHROPIC),
    Client("anthropic-0", "older", "use_anthropic", ANTHROPIC),
    Client("langchain", "current", "use_langchain", OPENAI, reports_code=True),
    Client("litellm", "litellm", "use_litellm", LITELLM),
    Client("litellm-vllm", "litellm", "use_litellm", LITELLM, waits=False),
    Client("pydantic-ai", "current", "use_pydantic_ai", ("pydantic_ai.ModelHTTPError",) * 3),
    Client("curl", None, "use_curl", ("curl.22",) * 3, reports_code=True, waits=False),
)
REFUSALS = {
    "wrong_key": (401, 0, "invalid_api_key", "The API key is not valid."),
    "unknown_model": (404, 1, "model_not_found", "The model `nobody/knows` does not exist"),
    "too_long": (400, 2, "context_length_exceeded", "maximum context length is 2048 tokens"),
    "too_long_streamed": (400, 2, "context_length_exceeded", "maximum context length is 2048 tokens"),
}


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    with visiting(tmp_path_factory.mktemp("clients"), tuple(client.name for client in CLIENTS)) as one:
        yield one


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name, scope="module")
def client(request: pytest.FixtureRequest) -> Client:
    one: Client = request.param
    return one


def reported(visit: Visit, client: Client, case: str) -> Any:
    """Return the report of a client's script for a case."""
    result = visit.report(client)[case]
    assert "failed" not in result, result["failed"]
    return result


def having(case: str) -> pytest.MarkDecorator:
    """Return the clients whose packages support a case."""
    of_openai, of_anthropic = ("openai", "openai-1", "openai-2", "openai-node"), ("anthropic", "anthropic-0")
    knowing = {
        "models": (*of_openai, "anthropic"),
        "responses": of_openai,
        "count_tokens": of_anthropic,
        "streamed_tool": (*of_openai, *of_anthropic, "langchain", "litellm", "litellm-vllm"),
    }
    return pytest.mark.parametrize("client", [each for each in CLIENTS if each.name in knowing[case]], ids=lambda client: client.name)


def test_a_chat(visit: Visit, client: Client) -> None:
    response = reported(visit, client, "chat")
    assert (response["text"], response["model"]) == (visit.spoken(), MODEL)
    assert response["tokens"] > 0
    assert response.get("request", "req_").startswith("req_")


def test_a_stream_says_the_same_in_pieces(visit: Visit, client: Client) -> None:
    response, whole = reported(visit, client, "stream"), reported(visit, client, "chat")
    assert (response["text"], response["tokens"]) == (whole["text"], whole["tokens"])
    assert response["pieces"] > 1


def test_a_tool_call(visit: Visit, client: Client) -> None:
    call = reported(visit, client, "tool")
    assert call["name"] == "get_weather"
    assert isinstance(call["arguments"]["city"], str)
    assert call.get("text") != ""


@having("streamed_tool")
def test_a_streamed_tool_call_is_the_same(visit: Visit, client: Client) -> None:
    call, whole = reported(visit, client, "streamed_tool"), reported(visit, client, "tool")
    assert (call["name"], call["arguments"]) == (whole["name"], whole["arguments"])


@having("models")
def test_the_models(visit: Visit, client: Client) -> None:
    assert reported(visit, client, "models") == [MODEL, BUSY]


@having("responses")
def test_responses(visit: Visit, client: Client) -> None:
    response = reported(visit, client, "responses")
    assert response["text"] == response["streamed"] == visit.spoken()
    assert (response["pieces"] > 1, response["last"]) == (True, "response.completed")


@having("count_tokens")
def test_tokens_are_counted_as_they_are_used(visit: Visit, client: Client) -> None:
    counted = reported(visit, client, "count_tokens")
    assert counted["counted"] == counted["used"] > 0


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_has_the_clients_own_class(visit: Visit, client: Client, case: str) -> None:
    status, which, code, text = REFUSALS[case]
    refusal = reported(visit, client, case)
    assert client.refusals[which] in refusal.get("classes", ()), refusal
    assert refusal["status_code"] == status
    assert text in refusal["words"]
    if client.reports_code:
        assert refusal["code"] == code


def test_a_request_to_an_overloaded_model_is_retried(visit: Visit, client: Client) -> None:
    """The server responds with 429 once. The client retries by itself, and not before Retry-After if it supports that header."""
    assert reported(visit, client, "again") == {"text": TEXT}
    first, second = visit.overloaded.request_times[visit.task(client.name)["again"]]
    assert second - first >= (1.0 if client.waits else 0.0)


def test_a_client_that_stops_listening_stops_the_model(visit: Visit, client: Client) -> None:
    """The script closes a stream and continues with other requests. The server detects the disconnect before the script ends."""
    assert reported(visit, client, "cancel") == {"pieces": 3}
    entry = visit.ended_early(client.name)
    assert entry["outcome"] == "disconnected"
    assert entry["ended"] < visit.report(client)["ended"]
    wait_for(lambda: [line for line in visit.log(client.name) if (line["status"], line.get("incomplete")) == (499, "client")])
    wait_for(lambda: visit.gateway.metric(f'vllm_gateway_inflight_requests{{model="{MODEL}"}}') == 0)
