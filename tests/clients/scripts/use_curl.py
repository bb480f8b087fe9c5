"""curl, as the documents show it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.clients.scripts.report import TASK, run, user


def command(body: dict[str, Any], *options: str, key: str = TASK["key"]) -> list[str]:
    headers = ["-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"]
    return ["curl", "-sS", *options, TASK["url"] + "/v1/chat/completions", *headers, "-d", json.dumps(body)]


def body_of(text: str, model: str = TASK["model"], **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": user(text), **more}


def send(body: dict[str, Any], *options: str) -> Any:
    return json.loads(subprocess.run(command(body, *options), capture_output=True, check=True).stdout)


def chat() -> Any:
    response = send(body_of(TASK["hello"]), "--fail-with-body")
    return {
        "text": response["choices"][0]["message"]["content"],
        "model": response["model"],
        "tokens": response["usage"]["completion_tokens"],
    }


def stream() -> Any:
    body = body_of(TASK["hello"], stream=True, stream_options={"include_usage": True})
    lines = subprocess.run(command(body, "-N"), capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    shown = [piece for piece in pieces if piece]
    return {"text": "".join(shown), "pieces": len(shown), "tokens": chunks[-1]["usage"]["completion_tokens"]}


def tool() -> Any:
    call = send(body_of(TASK["weather"], tools=[TASK["tool"]]))["choices"][0]["message"]["tool_calls"][0]["function"]
    return {"name": call["name"], "arguments": json.loads(call["arguments"])}


def cancel() -> Any:
    body = body_of(TASK["cancel"], stream=True, **TASK["slow"])
    with subprocess.Popen(command(body, "-N"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        events = [process.stdout.readline() for _ in range(6)]
        process.terminate()
    return {"pieces": sum(line.startswith(b"data: ") for line in events)}


def refused(body: dict[str, Any], key: str = TASK["key"]) -> Any:
    arguments = command(body, "--fail-with-body", "-w", "\n%{http_code}", key=key)
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    text, _, status = ended.stdout.rpartition("\n")
    return {"classes": [f"curl.{ended.returncode}"], "status_code": int(status), "words": text, "code": json.loads(text)["error"]["code"]}


run(
    cancel=cancel,
    chat=chat,
    stream=stream,
    tool=tool,
    wrong_key=lambda: refused(body_of(TASK["hello"]), TASK["wrong_key"]),
    unknown_model=lambda: refused(body_of(TASK["hello"], TASK["unknown_model"])),
    too_long=lambda: refused(body_of(TASK["too_long"])),
    too_long_streamed=lambda: refused(body_of(TASK["too_long"], stream=True)),
    again=lambda: {"text": send(body_of(TASK["again"], TASK["busy_model"]), "--fail", "--retry", "2")["choices"][0]["message"]["content"]},
)
