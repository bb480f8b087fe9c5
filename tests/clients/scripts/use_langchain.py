"""langchain-openai: ChatOpenAI."""

from __future__ import annotations

from itertools import islice
from typing import Any

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

from tests.clients.scripts.report import TASK, refused, run


def model(name: str = TASK["model"], key: str = TASK["key"], **more: Any) -> Any:
    return ChatOpenAI(model=name, api_key=key, base_url=TASK["url"] + "/v1", **more)


def chat() -> Any:
    response = model().invoke(TASK["hello"])
    return {"text": response.content, "model": response.response_metadata["model_name"], "tokens": response.usage_metadata["output_tokens"]}


def stream() -> Any:
    chunks = list(model(stream_usage=True).stream(TASK["hello"]))
    pieces = [chunk.content for chunk in chunks if chunk.content]
    tokens = sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
    return {"text": "".join(pieces), "pieces": len(pieces), "tokens": tokens}


def called(message: Any) -> Any:
    [call] = message.tool_calls
    return {"name": call["name"], "arguments": call["args"]}


def tool() -> Any:
    return called(model().bind_tools([TASK["tool"]]).invoke(TASK["weather"]))


def streamed_tool() -> Any:
    first, *others = model().bind_tools([TASK["tool"]]).stream(TASK["weather"])
    for each in others:
        first += each
    return called(first)


def cancel() -> Any:
    response = model(extra_body=TASK["slow"]).stream(TASK["cancel"])
    pieces = list(islice(response, 3))
    response.close()
    return {"pieces": len(pieces)}


run(
    cancel=cancel,
    chat=chat,
    stream=stream,
    tool=tool,
    streamed_tool=streamed_tool,
    wrong_key=lambda: refused(lambda: model(key=TASK["wrong_key"]).invoke(TASK["hello"])),
    unknown_model=lambda: refused(lambda: model(TASK["unknown_model"]).invoke(TASK["hello"])),
    too_long=lambda: refused(lambda: model().invoke(TASK["too_long"])),
    too_long_streamed=lambda: refused(lambda: list(model().stream(TASK["too_long"]))),
    again=lambda: {"text": model(TASK["busy_model"]).invoke(TASK["again"]).content},
)
