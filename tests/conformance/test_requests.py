"""Every request that the documents show, sent as it is shown, and every response compared with the shape that is shown for it."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.conformance import examples, shapes
from tests.conformance.examples import Case, SdkCall
from tests.conformance.shapes import lacks, stream_lacks
from tests.conformance.stage import Stage, on
from tests.vllm.chat import events

BY_KEY, WITHOUT_KEY = "not-needed", "dummy"


def check(stage: Stage, case: Case, model: str) -> None:
    """Send a case as ``curl`` does and compare the response with its shape."""
    status, headers, text = stage.curl(case.path, case.data, case.key, case.accept)
    assert status == 200, text
    if case.shape is not None:
        assert headers["content-type"] == "application/json"
        response = json.loads(text)
        if not (stage.real and case.tiny is not None and lacks(response, case.tiny) == []):
            assert lacks(response, case.shape) == []
        assert (response["model"], response["usage"]["total_tokens"]) == (model, sum_of(response["usage"]))
    else:
        assert headers["content-type"].startswith("text/event-stream")
        chunks = events(text)
        assert stream_lacks(chunks, usage=case.usage, reasoning=case.reasoning) == []
        assert {chunk["model"] for chunk in chunks} == {model}


def sum_of(usage: dict[str, int]) -> int:
    return usage["prompt_tokens"] + usage["completion_tokens"]


@on("simulator", "llama")
@pytest.mark.parametrize("case", examples.LLAMA_CASES, ids=str)
def test_llama(stage: Stage, case: Case) -> None:
    check(stage, case, examples.LLAMA)


@on("simulator", "qwen")
@pytest.mark.parametrize("case", examples.QWEN_CASES, ids=str)
def test_qwen(stage: Stage, case: Case) -> None:
    check(stage, case, examples.QWEN)


@on("simulator", "llama")
@pytest.mark.parametrize("case", examples.GENERIC_CASES, ids=str)
def test_generic(stage: Stage, case: Case) -> None:
    check(stage, case, examples.LLAMA)


@on("simulator", "llama")
@pytest.mark.parametrize("case", examples.INSTANCE_CASES, ids=str)
def test_instance(stage: Stage, case: Case) -> None:
    check(stage, case, examples.LLAMA)


@on("simulator", "llama")
@pytest.mark.parametrize("case", examples.LIGHT_CASES, ids=str)
def test_light(stage: Stage, case: Case) -> None:
    check(stage, case, examples.LLAMA)


# Through OpenAI's SDK


def create(stage: Stage, call: SdkCall) -> Any:
    """The snippet: the SDK with an arbitrary key."""
    with stage.sdk(call.mount, BY_KEY if call.mount else WITHOUT_KEY) as client:
        made = client.chat.completions.create(**call.arguments)
        return list(made) if call.arguments.get("stream") else made


@on("simulator", "llama")
@pytest.mark.parametrize("call", examples.SDK_CALLS, ids=str)
def test_snippet(stage: Stage, call: SdkCall) -> None:
    made = create(stage, call)
    if isinstance(made, list):
        assert "".join(chunk.choices[0].delta.content or "" for chunk in made)
    else:
        assert made.choices[0].message.content


@on("simulator", "llama")
def test_snippet_with_tools(stage: Stage) -> None:
    (choice,) = create(stage, examples.TOOLS_CALL).choices
    if choice.message.tool_calls:
        function = choice.message.tool_calls[0].function
        assert function.name == "get_weather" or stage.real  # the tiny model calls the only tool that it knows
        json.loads(function.arguments)
    else:
        assert stage.real and choice.message.content


@on("simulator", "llama")
def test_snippet_with_a_schema(stage: Stage) -> None:
    (choice,) = create(stage, examples.GUIDED_JSON).choices
    assert unfinished(stage, choice) or lacks(json.loads(choice.message.content), {"name": str, "age": int}) == []


@on("simulator", "llama")
def test_snippet_with_a_regex(stage: Stage) -> None:
    (choice,) = create(stage, examples.GUIDED_REGEX).choices
    prefix = re.fullmatch(examples.START_OF_EMAIL, choice.message.content)
    assert prefix if unfinished(stage, choice) else re.fullmatch(examples.EMAIL, choice.message.content)


def unfinished(stage: Stage, choice: Any) -> bool:
    """Whether an answer of a tiny model was cut: it does not know when to end a name of any length."""
    return stage.real and choice.finish_reason == "length"


@on("simulator", "llama")
def test_snippet_with_choices(stage: Stage) -> None:
    assert create(stage, examples.GUIDED_CHOICE).choices[0].message.content in examples.FEELINGS


@on("simulator")
def test_snippet_with_top_k_beside_the_sdks_own_arguments(stage: Stage) -> None:
    """As the light server's page writes it, the SDK itself refuses: what it does not know goes into its ``extra_body``."""
    with stage.sdk(key=WITHOUT_KEY) as client, pytest.raises(TypeError, match="top_k"):
        client.chat.completions.create(model=examples.LIGHT, messages=[{"role": "user", "content": "x"}], top_k=50)  # type: ignore[call-overload]


@on("simulator", "llama")
def test_snippet_with_errors(stage: Stage) -> None:
    with stage.sdk(examples.MOUNT, BY_KEY) as client, pytest.raises(openai.APIError) as caught:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.message and caught.value.code == "model_not_found"


def test_a_shape_finds_what_is_missing() -> None:
    response = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [], "usage": {"prompt_tokens": True}}
    assert lacks(response, shapes.TEXT) == [
        "$.choices is [], not a list with something in it",
        "$.usage.prompt_tokens is True, not <class 'int'>",
        "$.usage.completion_tokens is missing",
        "$.usage.total_tokens is missing",
    ]
    assert stream_lacks([], usage=False) == ["there is no chunk"]
