"""The other routes, each with the least that its answer must have."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.conformance.examples import LLAMA, Json, user
from tests.conformance.shapes import FilledText, Nullable, lacks
from tests.conformance.stage import Stage, on
from tests.support.process import wait_for

POOLED = on("simulator", "pooling")
GENERATING = on("simulator", "qwen")
ANYWHERE = on("simulator", "qwen", "llama", "pooling")

COUNTED: Json = {"prompt_tokens": int, "total_tokens": int}
RANKED: Json = {"id": FilledText, "results": [{"index": int, "document": dict, "relevance_score": float}], "usage": dict}
SCORED: Json = {"id": FilledText, "object": "list", "data": [{"index": int, "score": float}], "usage": COUNTED}
CLASSIFIED: Json = {
    "id": FilledText,
    "object": "list",
    "data": [{"index": int, "label": Nullable(str), "probs": [float]}],
    "usage": COUNTED,
}
EMBEDDED: Json = {"object": "list", "data": [{"object": "embedding", "index": int, "embedding": [float]}], "usage": COUNTED}
POOLED_DATA: Json = {"id": FilledText, "object": "list", "data": [{"index": int, "data": [float]}], "usage": COUNTED}

COHERE: Json = {
    "id": FilledText,
    "response_type": "embeddings_by_type",
    "embeddings": {"float": [[float]], "base64": [str], "binary": [[int]], "ubinary": [[int]]},
    "texts": [str],
    "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": int, "image_tokens": int}},
}

TEXTS: Json = {"input": ["Once", "upon a time"]}
RANK: Json = {"query": "Once", "documents": ["upon", "a time"]}
SCORE: Json = {"text_1": "Once", "text_2": ["upon", "a time"]}


def used(stage: Stage) -> float:
    """The tokens that the gateway has counted for all keys and models."""
    text = httpx2.get(f"http://127.0.0.1:{stage.gateway.admin}/metrics", timeout=60, verify=False).text
    lines = (line for line in text.splitlines() if line.startswith("vllm_gateway_tokens_total"))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def held(stage: Stage, path: str, body: Json, shape: Json) -> Json:
    """The answer, which has its shape."""
    response = stage.post(body, path)
    assert response.status_code == 200, response.text
    document: Json = response.json()
    assert lacks(document, shape) == []
    return document


@POOLED
@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/embeddings", TEXTS, EMBEDDED),
        *((path, RANK, RANKED) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
        *((path, SCORE, SCORED) for path in ("/v1/score", "/score")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pooling(stage: Stage, path: str, body: Json, shape: Json) -> None:
    held(stage, path, body, shape)


@POOLED
@pytest.mark.parametrize("path", ["/v1/pooling", "/pooling"])
def test_pooling_itself(stage: Stage, path: str) -> None:
    held(stage, path, {"input": "Once upon a time", "task": "embed"} if stage.real else TEXTS, POOLED_DATA)


@POOLED
def test_embeddings_by_the_sdk(stage: Stage) -> None:
    """It requests base64 and decodes it."""
    with stage.sdk() as client:
        made = client.embeddings.create(model=stage.model, input=TEXTS["input"])
    plain = stage.post({**TEXTS, "encoding_format": "float"}, "/v1/embeddings").json()
    assert [each.embedding for each in made.data] == [pytest.approx(each["embedding"], abs=1e-3) for each in plain["data"]]


@POOLED
def test_embeddings_in_coheres_api(stage: Stage) -> None:
    """Their tokens are counted, though they stand elsewhere in the response."""
    before = used(stage)
    body = {"texts": TEXTS["input"], "embedding_types": ["float", "base64", "binary", "ubinary"]}
    billed = held(stage, "/v2/embed", body, COHERE)["meta"]["billed_units"]
    assert billed["input_tokens"] > 0
    wait_for(lambda: used(stage) - before == billed["input_tokens"])


@POOLED
@pytest.mark.parametrize(
    "body", [{}, {"texts": []}, {"texts": ["a"], "images": ["data:,"]}, {"texts": ["a"], "input_type": "search_query"}]
)
def test_what_coheres_api_does_not_take(stage: Stage, body: Json) -> None:
    response = stage.post(body, "/v2/embed")
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@GENERATING
def test_a_batch_of_conversations(stage: Stage) -> None:
    before = used(stage)
    shared: Json = {"max_tokens": 100, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    requested = ["Who are you?", "What is the capital of France?"]
    message = {"role": "assistant", "content": FilledText}
    shape = {"object": "chat.completion", "choices": [{"index": int, "message": message, "finish_reason": str}], "usage": COUNTED}
    whole = held(stage, "/v1/chat/completions/batch", {**shared, "messages": [[user(each)] for each in requested]}, shape)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in whole["choices"]] == [
        stage.content({**shared, "messages": [user(each)]}) for each in requested
    ]
    wait_for(lambda: used(stage) - before == 2 * whole["usage"]["total_tokens"])


@GENERATING
def test_a_batch_has_the_rules_of_chat(stage: Stage) -> None:
    conversation = [user("Who are you?")]
    pictured = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}]
    for body, status, param in (
        ({"messages": [conversation], "n": 2}, 400, "n"),
        ({"messages": conversation}, 400, None),
        ({"messages": [conversation], "chat_template": "x"}, 400, "chat_template"),
        ({"messages": [conversation], "model": "other"}, 404, "model"),
        ({"messages": [conversation, pictured]}, 400, "messages.1.0.content.0.image_url"),
    ):
        response = stage.post(body, "/v1/chat/completions/batch")
        assert response.status_code == status, response.text
        assert param in (None, response.json()["error"]["param"])


@on("simulator")
@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classify(stage: Stage, path: str) -> None:
    held(stage, path, TEXTS, CLASSIFIED)


@ANYWHERE
def test_text_to_tokens_and_back(stage: Stage) -> None:
    made = held(stage, "/tokenize", {"prompt": "Once upon a time"}, {"count": int, "max_model_len": int, "tokens": [int]})
    back = held(stage, "/detokenize", {"tokens": made["tokens"]}, {"prompt": str})
    assert made["count"] == len(made["tokens"]) and back["prompt"].endswith("Once upon a time")


@on("simulator")
@pytest.mark.parametrize("task", ["transcriptions", "translations"])
def test_audio(stage: Stage, task: str) -> None:
    file: Any = ("a.wav", b"\x01" * 32000)
    with stage.client() as client:
        whole, chunks = (
            client.post(f"/v1/audio/{task}", data={"model": stage.model, "stream": stream}, files={"file": file}).text
            for stream in ("false", "true")
        )
    assert json.loads(whole)["text"]
    assert chunks.endswith("data: [DONE]\n\n") and json.loads(chunks.split("\n\n")[0].removeprefix("data: "))["choices"]


@on("simulator")
def test_audio_by_the_sdk(stage: Stage) -> None:
    with stage.sdk() as client:
        assert client.audio.transcriptions.create(model=stage.model, file=("a.wav", b"\x01" * 32000)).text


@GENERATING
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_completions(stage: Stage, streamed: bool) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    choice = {"index": 0, "text": str, "finish_reason": Nullable(str)}
    shape = {"id": FilledText, "object": "text_completion", "created": int, "model": stage.model, "choices": [choice]}
    if streamed:
        assert [problem for chunk in stage.chunks(body, "/v1/completions") for problem in lacks(chunk, shape)] == []
    else:
        held(stage, "/v1/completions", body, {**shape, "usage": {**COUNTED, "completion_tokens": int}})


@GENERATING
def test_responses_by_the_sdk(stage: Stage) -> None:
    with stage.sdk() as client:
        plain = client.responses.create(model=stage.model, input="Who are you?", temperature=0)
        *_, last = client.responses.create(model=stage.model, input="Who are you?", temperature=0, stream=True)
    assert plain.output_text and last.type == "response.completed" and last.response.output_text == plain.output_text


@GENERATING
@pytest.mark.parametrize("store", [True, False, None])
def test_responses_are_not_stored_whatever_is_requested(stage: Stage, store: bool | None) -> None:
    """OpenAI's default value of ``store`` is true; vLLM's response does not have the field."""
    body: Json = {"input": "Who are you?", "temperature": 0, "store": store}
    made = held(stage, "/v1/responses", body, {"id": FilledText, "object": "response", "status": "completed"})
    assert "store" not in made
    again = stage.post({"input": "And?", "previous_response_id": made["id"]}, "/v1/responses")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "previous_response_id")
    with stage.client() as client:
        gone = client.get(f"/v1/responses/{made['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        assert "responses are not stored" in gone.json()["error"]["message"]


@GENERATING
def test_messages(stage: Stage) -> None:
    body: Json = {"messages": [user("Who are you?")], "max_tokens": 100, "temperature": 0}
    usage = {"input_tokens": int, "output_tokens": int}
    shape = {
        "id": FilledText,
        "type": "message",
        "role": "assistant",
        "content": [{"type": str}],
        "stop_reason": "end_turn",
        "usage": usage,
    }
    response = held(stage, "/v1/messages", body, shape)
    counted = held(stage, "/v1/messages/count_tokens", {"messages": body["messages"]}, {"input_tokens": int})
    assert counted["input_tokens"] == response["usage"]["input_tokens"]


@ANYWHERE
def test_health_and_models(stage: Stage) -> None:
    with stage.client() as client:
        assert client.get("/health").status_code == 200
        listed = client.get("/v1/models").json()["data"]
    assert stage.model in [each["id"] for each in listed] and all(each["max_model_len"] == 2048 for each in listed)
    task = "embedding" if stage.name == "pooling" else "chat"
    assert {each["task"] for each in listed} == {task}, "by the launch arguments"
    assert all("tools" in each["supported_parameters"] if task == "chat" else "supported_parameters" not in each for each in listed)
    ids = {each["id"] for each in listed}
    assert all(each.get("root", stage.model) in ids and "permission" not in each for each in listed), "vLLM shows a path in root"


@on("simulator")
def test_the_server_gets_its_own_name_for_a_model(stage: Stage) -> None:
    response = stage.post({"model": "your-model-name", "messages": [user("Hi")]})
    assert stage.arrived(response)["body"]["model"] == LLAMA
