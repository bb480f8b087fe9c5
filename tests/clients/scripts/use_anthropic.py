"""The anthropic package: release 0 sends its key as x-api-key, current releases as a bearer token. The base URL is the gateway's root."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic  # type: ignore[import-not-found]

from tests.clients.scripts.report import LIMIT, TASK, refused, run, user

client: Any = Anthropic(base_url=TASK["url"], api_key=TASK["key"])
function = TASK["tool"]["function"]
TOOL = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


def body_of(text: str, model: str = TASK["model"]) -> dict[str, Any]:
    return {"model": model, "messages": user(text), "max_tokens": LIMIT}


def chat() -> Any:
    response = client.messages.create(**body_of(TASK["hello"]))
    return {"text": response.content[0].text, "model": response.model, "tokens": response.usage.output_tokens}


def stream() -> Any:
    with client.messages.stream(**body_of(TASK["hello"])) as events:
        pieces = list(events.text_stream)
        whole = events.get_final_message()
    return {"text": whole.content[0].text, "pieces": len(pieces), "tokens": whole.usage.output_tokens}


def tool() -> Any:
    response = client.messages.create(**body_of(TASK["weather"]), tools=[TOOL])
    [call] = [block for block in response.content if block.type == "tool_use"]
    return {"name": call.name, "arguments": call.input}


def streamed_tool() -> Any:
    with client.messages.stream(**body_of(TASK["weather"]), tools=[TOOL]) as events:
        [call] = [block for block in events.get_final_message().content if block.type == "tool_use"]
    return {"name": call.name, "arguments": call.input}


def cancel() -> Any:
    with client.messages.stream(**{**body_of(TASK["cancel"]), "max_tokens": 2000}, extra_body=TASK["slow"]) as events:
        pieces = [piece for _, piece in zip(range(3), events.text_stream, strict=False)]
    return {"pieces": len(pieces)}


def count_tokens() -> Any:
    counted = client.messages.count_tokens(model=TASK["model"], messages=user(TASK["hello"]))
    used = client.messages.create(**body_of(TASK["hello"])).usage
    return {"counted": counted.input_tokens, "used": used.input_tokens}


def again() -> Any:
    return {"text": client.messages.create(**body_of(TASK["again"], TASK["busy_model"])).content[0].text}


def models() -> Any:
    """List the models in pages of one model each. Every model has all fields that the package's own type requires."""
    found = list(client.models.list(limit=1))
    for model in found:
        type(model).model_validate_json(model.to_json())
    return [model.id for model in found]


run(
    cancel=cancel,
    chat=chat,
    stream=stream,
    tool=tool,
    streamed_tool=streamed_tool,
    models=models,
    count_tokens=count_tokens,
    wrong_key=lambda: refused(lambda: client.with_options(api_key=TASK["wrong_key"]).messages.create(**body_of(TASK["hello"]))),
    unknown_model=lambda: refused(lambda: client.messages.create(**body_of(TASK["hello"], TASK["unknown_model"]))),
    too_long=lambda: refused(lambda: client.messages.create(**body_of(TASK["too_long"]))),
    too_long_streamed=lambda: refused(lambda: client.messages.stream(**body_of(TASK["too_long"])).__enter__()),
    again=again,
)
