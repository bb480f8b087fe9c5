"""The openai package, as its README shows it; the same for releases 1, 2 and 3."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI, Timeout

from tests.clients.scripts.report import TASK, refused, run, user

client = OpenAI(base_url=TASK["url"] + "/v1", api_key=TASK["key"], timeout=Timeout(120, connect=5))
completions: Any = client.chat.completions


def chat() -> Any:
    response = completions.create(model=TASK["model"], messages=user(TASK["hello"]))
    return {
        "text": response.choices[0].message.content,
        "model": response.model,
        "tokens": response.usage.completion_tokens,
        "request": response._request_id,
    }


def stream() -> Any:
    options = {"include_usage": True}
    chunks = list(completions.create(model=TASK["model"], messages=user(TASK["hello"]), stream=True, stream_options=options))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    return {"text": "".join(pieces), "pieces": len(pieces), "tokens": chunks[-1].usage.completion_tokens}


def tool() -> Any:
    response = completions.create(model=TASK["model"], messages=user(TASK["weather"]), tools=[TASK["tool"]])
    call = response.choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def streamed_tool() -> Any:
    name = arguments = ""
    for chunk in completions.create(model=TASK["model"], messages=user(TASK["weather"]), tools=[TASK["tool"]], stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    return {"name": name, "arguments": json.loads(arguments)}


def responses() -> Any:
    response = client.responses.create(model=TASK["model"], input=TASK["hello"])
    events: Any = list(client.responses.create(model=TASK["model"], input=TASK["hello"], stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {"text": response.output_text, "streamed": "".join(pieces), "pieces": len(pieces), "last": events[-1].type}


def cancel() -> Any:
    response = completions.create(model=TASK["model"], messages=user(TASK["cancel"]), stream=True, extra_body=TASK["slow"])
    pieces = [chunk for _, chunk in zip(range(3), response, strict=False)]
    response.close()
    return {"pieces": len(pieces)}


def again() -> Any:
    response = completions.create(model=TASK["busy_model"], messages=user(TASK["again"]))
    return {"text": response.choices[0].message.content}


def models() -> Any:
    return [model.id for model in client.models.list()]


run(
    cancel=cancel,
    chat=chat,
    stream=stream,
    tool=tool,
    streamed_tool=streamed_tool,
    models=models,
    responses=responses,
    wrong_key=lambda: refused(
        lambda: client.with_options(api_key=TASK["wrong_key"]).chat.completions.create(model=TASK["model"], messages=[])
    ),
    unknown_model=lambda: refused(lambda: completions.create(model=TASK["unknown_model"], messages=user(TASK["hello"]))),
    too_long=lambda: refused(lambda: completions.create(model=TASK["model"], messages=user(TASK["too_long"]))),
    too_long_streamed=lambda: refused(lambda: list(completions.create(model=TASK["model"], messages=user(TASK["too_long"]), stream=True))),
    again=again,
)
