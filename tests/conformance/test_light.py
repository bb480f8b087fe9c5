"""The light server's API: messages or a raw prompt on the chat route, no key, and work that ends with its client."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.conformance.examples import ALIASES, CHAT, LIGHT, LLAMA, Json, user
from tests.conformance.shapes import TEXT, USAGE, lacks, stream_lacks
from tests.conformance.stage import Stage, on, simulated
from tests.support.process import configuration, gateway, wait_for
from tests.vllm.dialogues import COUNT, PROMPT_AND_CONTINUATION
from tests.vllm.gateway import GENERATED, NotAchieved, attempted

EVERYWHERE = on("simulator", "llama")
RAW: Json = {"model": LIGHT, "prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 60}
ENDLESS = 1900  # tokens
COUNTING: Json = {"model": LIGHT, "messages": [user("Count from 1 to 100.")], "temperature": 0, "max_tokens": 80}


@EVERYWHERE
def test_a_raw_prompt(stage: Stage) -> None:
    response = stage.post(RAW, key=None).json()
    assert lacks(response, TEXT) == [] and response["id"].startswith("cmpl-")
    with stage.directly(LLAMA) as vllm:
        same = vllm.post("/v1/completions", json={**RAW, "model": LLAMA}).json()
    assert response["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    assert {name: response["usage"][name] for name in USAGE} == {name: same["usage"][name] for name in USAGE}


@EVERYWHERE
@pytest.mark.parametrize("usage", [False, True])
def test_a_raw_prompt_streams(stage: Stage, usage: bool) -> None:
    chunks = stage.chunks({**RAW, "stream_options": {"include_usage": usage}}, key=None)
    assert stream_lacks(chunks, usage=usage) == []
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == stage.post(RAW, key=None).json()["choices"][0]["message"]["content"]
    assert all(chunk["id"].startswith("cmpl-") for chunk in chunks)


@EVERYWHERE
def test_a_raw_prompt_by_the_sdk(stage: Stage) -> None:
    arguments: Any = {
        "model": LIGHT,
        "messages": openai.omit,
        "temperature": 0,
        "max_tokens": 60,
        "extra_body": {"prompt": PROMPT_AND_CONTINUATION[0]},
    }
    with stage.sdk(key="dummy") as client:
        plain = client.chat.completions.create(**arguments)
        chunks = list(client.chat.completions.create(stream=True, **arguments))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    assert (chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason) == ("assistant", "stop")


@EVERYWHERE
def test_a_raw_prompt_has_16_tokens_by_default(stage: Stage) -> None:
    response = stage.post({"model": LIGHT, "prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0}, key=None).json()
    assert (response["usage"]["completion_tokens"], response["choices"][0]["finish_reason"]) == (16, "length")


def test_messages_have_16_tokens_if_the_operator_says_so(tmp_path: Path) -> None:
    model = {**simulated(LLAMA, "llama"), "defaults": {"max_tokens": 16}}
    config = {**configuration(model), "keys": [{"id": "nobody", "anonymous": True}]}
    with gateway(tmp_path, config) as one:
        unsaid = {name: value for name, value in COUNTING.items() if name != "max_tokens"}
        responses = [httpx2.post(one.url + CHAT, json=body, timeout=60).json() for body in (unsaid, {**unsaid, "max_tokens": 20})]
    assert [response["usage"]["completion_tokens"] for response in responses] == [16, 20]


@EVERYWHERE
@pytest.mark.parametrize("body", [{"prompt": "Hi", "messages": [user("Hi")]}, {}], ids=["both", "neither"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_both_and_neither_are_refused(stage: Stage, body: Json, streamed: bool) -> None:
    error = stage.post({"model": LIGHT, "stream": streamed, **body}, key=None)
    assert (error.status_code, error.json()["error"]["type"]) == (400, "invalid_request_error")
    assert error.json()["error"]["param"] in ("prompt", "messages")


@EVERYWHERE
def test_the_models(stage: Stage) -> None:
    with stage.client(None) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [LLAMA, *ALIASES]
        assert client.get(f"/v1/models/{LIGHT}").json()["id"] == LLAMA


# Parameters that the light server only accepts, or has, and vLLM has all


@EVERYWHERE
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "raw prompt"])
def test_null_is_the_same_as_an_omitted_field(stage: Stage, raw: bool) -> None:
    unsaid = dict.fromkeys(("n", "stream", "stop", "temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty"))
    response = stage.post({**(RAW if raw else COUNTING), **unsaid}, key=None)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 1


@EVERYWHERE
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "raw prompt"])
def test_ignore_eos_continues(stage: Stage, raw: bool) -> None:
    body = {**(RAW if raw else {**COUNTING, "messages": [user("Who are you?")]}), "max_tokens": 70}
    ended, went_on = (stage.post({**body, "ignore_eos": ignored}, key=None).json() for ignored in (False, True))
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] < 70
    assert went_on["choices"][0]["finish_reason"] == "length" and went_on["usage"]["completion_tokens"] == 70


@on("llama")
def test_temperature_0_and_top_k_1_are_greedy(stage: Stage) -> None:
    body = {"messages": [user("Roll a die.")], "max_tokens": 5, "temperature": 1}
    assert len({stage.content({**body, "seed": seed}) for seed in range(12)}) > 1
    for greedy in ({"temperature": 0}, {"top_k": 1}):
        assert {stage.content({**body, "seed": seed, **greedy}) for seed in range(6)} == {"4"}


@on("llama")
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "raw prompt"])
def test_stop_works(stage: Stage, raw: bool) -> None:
    body, whole, stop = (RAW, PROMPT_AND_CONTINUATION[1], " never") if raw else (COUNTING, COUNT, ", 5")
    response = stage.post({**body, "stop": [stop]}, key=None).json()["choices"][0]
    assert (response["message"]["content"], response["finish_reason"]) == (whole[: whole.index(stop)], "stop")


@on("llama")
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "raw prompt"])
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_work(stage: Stage, penalty: str, raw: bool) -> None:
    body = {**(RAW if raw else {**COUNTING, "messages": [user("Who are you?")]}), "ignore_eos": True}  # past its end it is less certain
    weighed = {
        name: weighed_tokens(stage, {**body, **more}) for name, more in {"plain": {}, "none": {penalty: 0}, "most": {penalty: 2}}.items()
    }
    assert weighed["plain"] == weighed["none"] != weighed["most"]


def weighed_tokens(stage: Stage, body: Json) -> list[tuple[str, float]]:
    """The tokens of an answer with their log probabilities."""
    response = stage.post({**body, "logprobs": True}, key=None).json()
    return [(token["token"], round(token["logprob"], 2)) for token in response["choices"][0]["logprobs"]["content"]]


# Leaving


@EVERYWHERE
@pytest.mark.parametrize("raw", [False, True], ids=["messages", "raw prompt"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_client_that_disconnects_frees_the_server(stage: Stage, raw: bool, streamed: bool) -> None:
    body = {**(RAW if raw else COUNTING), "model": LLAMA, "max_tokens": ENDLESS, "ignore_eos": True, "stream": streamed}
    slow = {} if stage.real else {"simulate": {"tokens_per_second": 20}}  # a minute and a half for the complete response
    attempted(lambda _: check_that_a_disconnect_frees_the_server(stage, {**body, **slow}))


def check_that_a_disconnect_frees_the_server(stage: Stage, body: Json) -> None:
    """Raise NotAchieved if a real engine had generated the complete response before the client disconnected."""
    in_flight = f'vllm_gateway_inflight_requests{{model="{LLAMA}"}}'
    before, finished = stage.count(GENERATED, LLAMA), stage.finished(LLAMA)
    with stage.held(LLAMA) as work_until, closing(http.client.HTTPConnection("127.0.0.1", stage.gateway.data, timeout=60)) as connection:
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        work_until(lambda: stage.count(GENERATED, LLAMA) > before)
        if body["stream"]:
            connection.getresponse().read(10)
        connection.close()
        wait_for(lambda: stage.gateway.metric(in_flight) == 0)
        if stage.real:
            wait_for(lambda: stage.finished(LLAMA) == finished + 1)
            if stage.count(GENERATED, LLAMA) - before >= ENDLESS:
                raise NotAchieved
    wait_for(lambda: stage.count("vllm:num_requests_running", LLAMA) == 0)
    assert stage.count(GENERATED, LLAMA) - before < ENDLESS
