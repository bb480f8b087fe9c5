"""pydantic-ai: an agent, its stream and its tool."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

from tests.clients.scripts.report import TASK, refused, run

function = TASK["tool"]["function"]


def agent(model: str = TASK["model"], key: str = TASK["key"]) -> Any:
    return Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=TASK["url"] + "/v1", api_key=key)))


def chat() -> Any:
    response = agent().run_sync(TASK["hello"])
    return {"text": response.output, "model": response.all_messages()[-1].model_name, "tokens": response.usage.output_tokens}


async def streamed(text: str, most: int | None = None, **more: Any) -> tuple[list[str], int]:
    async with agent().run_stream(text, **more) as response:
        pieces: list[str] = []
        async for piece in response.stream_text(delta=True, debounce_by=None):
            pieces.append(piece)
            if len(pieces) == most:
                break
        return pieces, response.usage.output_tokens


def stream() -> Any:
    pieces, tokens = asyncio.run(streamed(TASK["hello"]))
    return {"text": "".join(pieces), "pieces": len(pieces), "tokens": tokens}


def tool() -> Any:
    """The agent calls the tool and sends its result to the model. The model's text is the result."""
    one = agent()
    calls = []

    def weather(city: str) -> str:
        calls.append({"name": function["name"], "arguments": {"city": city}})
        return "Sunny."

    one.tool_plain(weather, name=function["name"], description=function["description"])
    response = one.run_sync(TASK["weather"])
    return {**calls[0], "text": response.output}


def cancel() -> Any:
    pieces, _ = asyncio.run(streamed(TASK["cancel"], most=3, model_settings={"extra_body": TASK["slow"]}))
    return {"pieces": len(pieces)}


run(
    cancel=cancel,
    chat=chat,
    stream=stream,
    tool=tool,
    wrong_key=lambda: refused(lambda: agent(key=TASK["wrong_key"]).run_sync(TASK["hello"])),
    unknown_model=lambda: refused(lambda: agent(TASK["unknown_model"]).run_sync(TASK["hello"])),
    too_long=lambda: refused(lambda: agent().run_sync(TASK["too_long"])),
    too_long_streamed=lambda: refused(lambda: asyncio.run(streamed(TASK["too_long"]))),
    again=lambda: {"text": agent(TASK["busy_model"]).run_sync(TASK["again"]).output},
)
