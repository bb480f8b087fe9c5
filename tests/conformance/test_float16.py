"""The API on an instance's own URL: one model behind it, no key, guided decoding under its old names, and its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.conformance.examples import ALIASES, CHAT, FEELINGS, INSTANCED, LLAMA, MOUNT, QWEN, Json, user
from tests.conformance.shapes import ERROR, JsonText, lacks
from tests.conformance.stage import Stage, on

INSTANCE = MOUNT + CHAT
EVERYWHERE = on("simulator", "llama")
INTRODUCTION: Json = {"model": INSTANCED, "messages": [user("Who are you?")], "temperature": 0, "max_tokens": 60}


# The instance's URL


@EVERYWHERE
@pytest.mark.parametrize("key", [None, "not-needed", "of-another-service." * 100], ids=["none", "one", "long"])
def test_no_key_is_needed(stage: Stage, key: str | None) -> None:
    assert stage.post(INTRODUCTION, INSTANCE, key).status_code == 200


@EVERYWHERE
def test_a_key_that_looks_like_one_is_still_checked(stage: Stage) -> None:
    response = stage.post(INTRODUCTION, INSTANCE, "sk-wrong")
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


@EVERYWHERE
def test_an_instance_lists_its_own_model_alone(stage: Stage) -> None:
    with stage.client(None) as client:
        listed = client.get(f"{MOUNT}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == [LLAMA, *ALIASES]
        assert {each["root"] for each in listed[1:]} == {LLAMA}
    with stage.sdk(MOUNT, "not-needed") as sdk:
        assert [each.id for each in sdk.models.list()] == [LLAMA, *ALIASES] and sdk.models.retrieve(LLAMA).id == LLAMA


@EVERYWHERE
@pytest.mark.parametrize("name", [LLAMA, INSTANCED, None], ids=["id", "alias", "none"])
def test_an_instance_serves_its_model_by_its_names_or_none(stage: Stage, name: str | None) -> None:
    assert stage.post({**INTRODUCTION, "model": name}, INSTANCE, None).json()["model"] == LLAMA


@EVERYWHERE
def test_other_routes_are_there_too(stage: Stage) -> None:
    response = stage.post({"model": LLAMA, "prompt": "Once upon a time", "max_tokens": 5}, f"{MOUNT}/v1/completions", None)
    assert (response.status_code, response.json()["object"]) == (200, "text_completion")


@on("simulator")
def test_defaults_are_vllms(stage: Stage) -> None:
    """Nothing is added to a request: what it does not say, the server decides."""
    body = {"model": INSTANCED, "messages": [user("Hello!")]}
    assert stage.arrived(stage.post(body, INSTANCE, None))["body"] == {**body, "model": LLAMA}


@EVERYWHERE
def test_a_message_may_have_every_member_that_is_shown(stage: Stage) -> None:
    output = [{**user("My name is Ada."), "name": "ada"}, {"role": "assistant", "content": "Hello Ada!", "tool_calls": []}]
    response = stage.post({**INTRODUCTION, "messages": [*output, user("What is my name?")]}, INSTANCE, None)
    assert response.status_code == 200, response.text
    assert not stage.real or response.json()["choices"][0]["message"]["content"] == "Your name is Ada."


# Guided decoding

MADRID: Json = {
    "type": "object",
    "properties": {"country": {"enum": ["Spain"]}, "capital": {"enum": ["Madrid"]}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
CAPITAL: Json = {**INTRODUCTION, "messages": [user("Give me the capital of France as JSON.")]}
SPANISH = JsonText({"country": "Spain", "capital": "Madrid"})


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint under its old name, a request, and a function that checks a response against the constraint."""

    name: str
    value: Any
    matches: Callable[[str], Any]
    body: Json = field(default_factory=lambda: INTRODUCTION)
    field_name: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def fields(self) -> Json:
        return {self.field_name or self.name: self.value}


GUIDES = [
    Guide("json", MADRID, lambda text: lacks(text, SPANISH) == [], CAPITAL, "guided_json"),
    Guide("json in a string", json.dumps(MADRID), lambda text: lacks(text, SPANISH) == [], CAPITAL, "guided_json"),
    Guide("guided_regex", "[0-9]{3}-[0-9]{4}", lambda text: re.fullmatch("[0-9]{3}-[0-9]{4}", text)),
    Guide("guided_choice", FEELINGS, lambda text: text in FEELINGS),
    Guide("guided_grammar", 'root ::= "yes, " ("sir" | "madam")', lambda text: text in ("yes, sir", "yes, madam")),
]
EVERY_GUIDE = pytest.mark.parametrize("guide", GUIDES, ids=str)


@EVERYWHERE
@pytest.mark.parametrize("nested", [False, True], ids=["top level", "extra_body"])
@EVERY_GUIDE
def test_guided_decoding_binds(stage: Stage, guide: Guide, nested: bool) -> None:
    response = stage.post({**guide.body, **({"extra_body": guide.fields} if nested else guide.fields)}, INSTANCE, None)
    assert response.status_code == 200, response.text
    if stage.real or guide.name != "guided_grammar":
        assert guide.matches(response.json()["choices"][0]["message"]["content"])
    else:  # the simulator reads no grammars
        assert stage.arrived(response)["body"]["structured_outputs"] == {"grammar": guide.value}


@EVERYWHERE
@EVERY_GUIDE
def test_vllm_itself_ignores_the_old_names(stage: Stage, guide: Guide) -> None:
    with stage.directly(LLAMA) as vllm:
        responses = [vllm.post(CHAT, json={**guide.body, "model": LLAMA, **more}).json() for more in ({}, guide.fields)]
    plain, guided = (response["choices"][0]["message"]["content"] for response in responses)
    assert plain == guided and not guide.matches(guided)


@EVERYWHERE
def test_guided_decoding_streams(stage: Stage) -> None:
    chunks = stage.chunks({**INTRODUCTION, "guided_choice": ["positive", "negative"]}, INSTANCE, None)
    output = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert output in ("positive", "negative")


@EVERYWHERE
@pytest.mark.parametrize(
    "conflict",
    [
        {"guided_choice": ["a"], "guided_regex": "a"},
        {"guided_choice": ["a"], "extra_body": {"guided_json": {"type": "object"}}},
        {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
    ],
    ids=["two", "one in extra_body", "structured_outputs", "response_format"],
)
def test_two_constraints_are_a_clear_400(stage: Stage, conflict: Json) -> None:
    response = stage.post({**INTRODUCTION, **conflict}, INSTANCE, None)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert response.json()["error"]["param"] in ("guided_choice", "guided_regex", "structured_outputs", "response_format")


@on("llama")
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("guide", [{"guided_regex": "("}, {"guided_json": {"type": "nonsense"}}], ids=["regex", "json"])
def test_an_invalid_constraint_is_a_400(stage: Stage, guide: Json, streamed: bool) -> None:
    response = stage.post({**INTRODUCTION, **guide, "stream": streamed}, INSTANCE, None)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


# Errors


@EVERYWHERE
@pytest.mark.parametrize("name", ["no-such-model", QWEN])
def test_model_not_found(stage: Stage, name: str) -> None:
    """A model that is not this instance's, wherever else it may be."""
    response = stage.post({**INTRODUCTION, "model": name}, INSTANCE, None)
    assert response.status_code == 404 and lacks(response.json(), ERROR) == []
    assert {name: response.json()["error"][name] for name in ("type", "code", "param")} == {
        "type": "invalid_request_error", "code": "model_not_found", "param": "model",
    }  # fmt: skip


@EVERYWHERE
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_context_length_exceeded(stage: Stage, streamed: bool) -> None:
    response = stage.post({**INTRODUCTION, "messages": [user("word " * 4000)], "stream": streamed}, INSTANCE, None)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@on("simulator")
@pytest.mark.parametrize("fault", [{"status": 500}, {"error_first": True}], ids=["status", "engine"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_server_error(stage: Stage, fault: Json, streamed: bool) -> None:
    response = stage.post({**INTRODUCTION, "stream": streamed, "simulate": fault}, INSTANCE, None)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "server_error")


@on("simulator")
def test_the_sdk_knows_the_errors(stage: Stage) -> None:
    wrong: list[tuple[type[openai.APIStatusError], Json]] = [
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"model": INSTANCED, "temperature": 3}),
        (openai.InternalServerError, {"model": INSTANCED, "extra_body": {"simulate": {"status": 500}}}),
    ]
    with stage.sdk(MOUNT, "not-needed") as client:
        for kind, arguments in wrong:
            with pytest.raises(kind) as caught:
                client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **arguments)
            assert caught.value.message and caught.value.type in ("invalid_request_error", "server_error")
