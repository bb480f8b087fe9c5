"""litellm as a client, with its provider for OpenAI-compatible servers or for vLLM. The two are different clients internally."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm  # type: ignore[import-not-found]

from tests.clients.scripts.report import TASK, refused, run, user

PROVIDER = {"litellm": "openai", "litellm-vllm": "hosted_vllm"}[TASK["client"]]
AGAIN: dict[str, Any] = {"openai": {"max_retries": 2}, "hosted_vllm": {"num_retries": 2}}[
    PROVIDER
]  # each provider ignores the other provider's setting
litellm.suppress_debug_info = True  # otherwise it is printed among the results


def body_of(text: str, model: str = TASK["model"], key: str = TASK["key"]) -> dict[str, Any]:
    return {"model": f"{PROVIDER}/{model}", "api_base": TASK["url"] + "/v1", "api_key": key, "messages": user(text)}


def complete(text: str, model: str = TASK["model"], key: str = TASK["key"], **more: Any) -> Any:
    return litellm.completion(**body_of(text, model, key), **more)


def chat() -> Any:
    response = complete(TASK["hello"])
    model = response.model.removeprefix(f"{PROVIDER}/")
    return {"text": response.choices[0].message.content, "model": model, "tokens": response.usage.completion_tokens}


def stream() -> Any:
    chunks = list(complete(TASK["hello"], stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    return {"text": "".join(pieces), "pieces": len(pieces), "tokens": chunks[-1].usage.completion_tokens}


def tool() -> Any:
    call = complete(TASK["weather"], tools=[TASK["tool"]]).choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def streamed_tool() -> Any:
    whole = litellm.stream_chunk_builder(list(complete(TASK["weather"], tools=[TASK["tool"]], stream=True)))
    call = whole.choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


async def cancelled() -> list[Any]:
    response = await litellm.acompletion(**body_of(TASK["cancel"]), stream=True, extra_body=TASK["slow"])
    pieces = [await anext(response) for _ in range(3)]
    await response.aclose()
    return pieces


def cancel() -> Any:
    """Stream asynchronously, because a synchronous stream of litellm has no public method to close it."""
    return {"pieces": len(asyncio.run(cancelled()))}


run(
    cancel=cancel,
    chat=chat,
    stream=stream,
    tool=tool,
    streamed_tool=streamed_tool,
    wrong_key=lambda: refused(lambda: complete(TASK["hello"], key=TASK["wrong_key"])),
    unknown_model=lambda: refused(lambda: complete(TASK["hello"], TASK["unknown_model"])),
    too_long=lambda: refused(lambda: complete(TASK["too_long"])),
    too_long_streamed=lambda: refused(lambda: list(complete(TASK["too_long"], stream=True))),
    again=lambda: {"text": complete(TASK["again"], TASK["busy_model"], **AGAIN).choices[0].message.content},
)
