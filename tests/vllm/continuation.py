"""Cut recorded streams of a real vLLM, continue each by every path, compare the result with the undisturbed stream, and write the table.

    .venv/bin/python -m tests.vllm.continuation

It writes the table of docs/continuation.md. The rule: a path gets what a gateway has after a cut, and nothing else: the request, and the
events until the cut.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson

from gateway.api.routes import Dialect
from gateway.continuation.completion import ContinuedCompletion
from gateway.continuation.plan import plan_of
from gateway.continuation.regeneration import DifferentError
from gateway.continuation.token_record import TokenRecord
from gateway.snapshot.snapshot import Resume
from tests.documents.tables import table as rows_of
from tests.vllm.dialogues import HANGZHOU, WEATHER, Architecture, Json, user
from tests.vllm.server import PARSERS, Flag, running
from upstream.http.sse import data_of, split

PAGE = Path(__file__).resolve().parents[2] / "docs" / "continuation.md"
BEGIN, END = "<!-- begin: made by python -m tests.vllm.continuation -->", "<!-- end -->"

CUTS = 4
"""Random positions at which the stream of each row is cut."""

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
RENDER, GENERATE = f"{CHAT}/render", "/inference/v1/generate"
FLAGS: Mapping[Architecture, Mapping[str, Flag]] = {name: {**PARSERS[name], "enable-scale-out": True} for name in PARSERS}

EQUAL, DIFFERENT, IMPOSSIBLE = "equal", "different", "–"
CONTINUED, REGENERATED, ENDS = "continued", "regenerated", "ends"


@dataclass(frozen=True, slots=True)
class Row:
    """A request whose stream is cut."""

    feature: str
    path: str
    body: Json
    architecture: Architecture = "qwen3"


PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
COUNT = {"messages": [user("Count from 1 to 100.")], "temperature": 0, "max_tokens": 120, **PLAIN}
POINTS = {"messages": [user("Explain Qwen in three short bullet points.")], "temperature": 0, "max_tokens": 200}
CALLS = {"messages": [user("Compare the weather in Hangzhou and Paris.")], "tools": [WEATHER], "temperature": 0, "max_tokens": 300}
CHINESE = {"messages": [user("Say hello in Chinese with emoji.")], "temperature": 0, "max_tokens": 300}
CAPITAL = {"messages": [user("Give me the capital of France as JSON.")], "temperature": 0, "max_tokens": 200, **PLAIN}
CLOSE = {**COUNT, "max_tokens": 60, "ignore_eos": True, "logit_bias": {"300": 50, "301": 49.5, "302": 49, "303": 48.5}}
"""Some tokens are so close that a penalty decides between them."""
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("country", "capital", "continent", "language")},
    "required": ["country", "capital", "continent", "language"],
    "additionalProperties": False,
}
CHINESE_PROMPT = "<|im_start|>user\nSay hello in Chinese with emoji.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60}
UNSURE = {**POINTS, "temperature": 2, "max_tokens": 60}

ROWS: Sequence[Row] = (
    Row("content", CHAT, COUNT),
    Row("reasoning", CHAT, POINTS),
    Row("tools, parser `qwen3_coder`", CHAT, CALLS),
    Row("tools, parser `llama3_json`", CHAT, {**CALLS, "messages": [user(HANGZHOU)]}, "llama"),
    Row("multi-byte text", CHAT, CHINESE),
    Row("multi-byte text, only a tool parser", CHAT, CHINESE, "llama"),
    Row("`stop`", CHAT, {**COUNT, "stop": ["30, 31, 32"]}),
    Row("`stop`, tools", CHAT, {**CALLS, "stop": ["a text that does not come"]}),
    Row("`logit_bias`", CHAT, {**COUNT, "logit_bias": {"300": 4, "22": -4}}),
    Row("`min_tokens`", CHAT, {**POINTS, "messages": [user("Who are you?")], "min_tokens": 60, "max_tokens": 80}),
    Row("`thinking_token_budget`", CHAT, {**POINTS, "thinking_token_budget": 8}),
    Row("`repetition_penalty`", CHAT, {**CLOSE, "repetition_penalty": 1.3}),
    Row("`frequency_penalty`", CHAT, {**CLOSE, "frequency_penalty": 1}),
    Row("`presence_penalty`", CHAT, {**CLOSE, "presence_penalty": 2}),
    Row("`structured_outputs`: `choice`", CHAT, {**CAPITAL, "structured_outputs": {"choice": ["a small red house", "a small blue house"]}}),
    Row(
        "`response_format`: `json_schema`",
        CHAT,
        {**CAPITAL, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    Row("`tool_choice`: `required`", CHAT, {**CALLS, **PLAIN, "tool_choice": "required"}),
    Row("`logprobs`", CHAT, {**POINTS, "logprobs": True, "top_logprobs": 1}),
    Row("`include_reasoning`: `false`", CHAT, {**POINTS, "include_reasoning": False}),
    Row("sampling with `seed`", CHAT, {**UNSURE, "seed": 7}),
    Row("sampling with `seed`, `n`: 2", CHAT, {**UNSURE, "seed": 7, "n": 2}),
    Row("sampling without `seed`", CHAT, UNSURE),
    Row("text", COMPLETIONS, PROMPT),
    Row("multi-byte text", COMPLETIONS, {**PROMPT, "prompt": CHINESE_PROMPT, "max_tokens": 100}),
    Row("`stop`", COMPLETIONS, {**PROMPT, "stop": ["a gateway that"]}),
    Row("`stop` in multi-byte text", COMPLETIONS, {**PROMPT, "prompt": CHINESE_PROMPT, "max_tokens": 100, "stop": ["很好 😀", "café"]}),
    Row("`stop`, `include_stop_str_in_output`", COMPLETIONS, {**PROMPT, "stop": ["way that nev"], "include_stop_str_in_output": True}),
    Row("`stop`, `min_tokens`", COMPLETIONS, {**PROMPT, "stop": ["a"], "min_tokens": 12}),
    Row("`logprobs`", COMPLETIONS, {**PROMPT, "logprobs": 1}),
    Row("sampling with `seed`", COMPLETIONS, {**PROMPT, "temperature": 2, "seed": 7}),
    Row("text and thinking", MESSAGES, {**POINTS}),
    Row("tools", MESSAGES, {**CALLS, "tools": [{"name": "get_current_weather", "input_schema": WEATHER["function"]["parameters"]}]}),
    Row("text and reasoning", RESPONSES, {"input": POINTS["messages"], "temperature": 0, "max_output_tokens": 200}),
    Row(
        "tools",
        RESPONSES,
        {"input": CALLS["messages"], "tools": [{"type": "function", **WEATHER["function"]}], "temperature": 0, "max_output_tokens": 300},
    ),
)


@dataclass(slots=True)
class Choice:
    """A choice of a response, as far as it is known. ``lengths``: the tokens of each event."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    finish: str | None = None
    ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, part: Json) -> None:
        """Add a choice of an event, or a whole choice."""
        delta = part.get("delta") or part.get("message") or {"content": part.get("text")}
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning") or ""
        for at, call in enumerate(delta.get("tool_calls") or ()):
            self._call(call.get("index", at), call)
        self.logprobs += _logprobs(part.get("logprobs") or {})
        self.finish = part.get("finish_reason") or self.finish
        self.ids += part.get("token_ids") or ()
        self.lengths += [len(part["token_ids"])] if part.get("token_ids") else []

    def _call(self, index: int, call: Json) -> None:
        if call.get("id") is not None and index not in range(len(self.calls)):
            self.calls.append(["", ""])
            self.call_ids.append(call["id"])
        for at, name in enumerate(("name", "arguments")):
            self.calls[index][at] += call["function"].get(name) or ""

    def same(self, other: Choice) -> bool:
        """Return whether a client would see no difference."""
        shown = all(getattr(self, name) == getattr(other, name) for name in ("content", "reasoning", "calls", "finish"))
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        near = all(mine[0] == its[0] and math.isclose(mine[1], its[1], abs_tol=1e-3) for mine, its in pairs)
        return shown and near and len(self.logprobs) == len(other.logprobs)


Choices = dict[int, Choice]
Results = dict[str, str]
"""The result of each path, and the outcome."""


def _logprobs(given: Json) -> list[tuple[str, float]]:
    if "tokens" in given:
        return list(zip(given["tokens"], given["token_logprobs"], strict=True))
    return [(each["token"], each["logprob"]) for each in given.get("content") or ()]


@dataclass(frozen=True, slots=True)
class Record:
    """A stream as it is known at a cut."""

    client: httpx2.Client
    row: Row
    body: Json
    events: Sequence[Json]
    prompt: list[int]
    choices: Choices

    @property
    def context(self) -> Json:
        """Return what each call of derender repeats."""
        return {"prompt_token_ids": self.prompt, "chat_request": self.body}

    def remaining(self, made: int) -> Json:
        """Return the limits for the tokens after the first ones."""
        least = {"min_tokens": max(0, self.body["min_tokens"] - made)} if "min_tokens" in self.body else {}
        return {"max_tokens": self.body["max_tokens"] - made, **least}

    def post(self, path: str, body: Json) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


class ImpossibleError(Exception):
    """The API does not have the path."""


Continue = Callable[[Record, int, random.Random], Choice]


def _random_groups(dice: random.Random, ids: list[int]) -> list[list[int]]:
    groups = []
    while ids:
        count = dice.randint(1, 20)
        groups.append(ids[:count])
        ids = ids[count:]
    return groups


def by_token_ids(record: Record, index: int, dice: random.Random) -> Choice:
    """Continue with the token IDs, and derender several at a time."""
    shown = record.choices[index]
    if record.row.path == COMPLETIONS:
        return _completed(record, shown)
    rendered = record.post(RENDER, record.body)
    params = {name: value for name, value in rendered["sampling_params"].items() if name != "n"} | record.remaining(len(shown.ids))
    request = {**rendered, "token_ids": record.prompt + shown.ids, "sampling_params": params, "reasoning_ended": None, "stream": False}
    [rest] = record.post(GENERATE, request)["choices"]
    ids: list[int] = rest["token_ids"]
    if "stop" in record.body:
        return _until_stop(record, shown, _derendered(record, _random_groups(dice, shown.ids + ids), None, rest))
    state: Json = {
        "output_token_ids": shown.ids,
        "output_chunk_lens": shown.lengths,
        "role_sent": True,
        "tools_streamed": bool(shown.calls),
        "last_tool_call_ids": shown.call_ids,
    }
    return _derendered(record, _random_groups(dice, ids), state, rest, shown)


def _derendered(record: Record, groups: list[list[int]], state: Json | None, rest: Json, shown: Choice | None = None) -> Choice:
    """Derender groups of tokens, and return what was shown with what they add.

    The last token is left out if it ended the response: with only a tool parser, vLLM would show its text.
    """
    joined = _copy(shown or Choice())
    if rest["finish_reason"] == "stop" and rest["stop_reason"] is None:
        groups = [*groups[:-1], groups[-1][:-1]]
    for at, ids in enumerate(groups):
        finish = rest["finish_reason"] if at == len(groups) - 1 else None
        chunk = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": finish}]}
        response = record.post(f"{CHAT}/derender", {"stream": True, "generate_chunk": chunk, "stream_state": state, **record.context})
        state = response["stream_state"]
        for choice in response["chunk"]["choices"]:
            joined.add({**choice, "token_ids": None})
    return joined


def _until_stop(record: Record, shown: Choice, whole: Choice) -> Choice:
    """End the decoded response at the stop string. It must start with what was sent.

    vLLM holds text back that may be the start of a stop string, so the token IDs are ahead of the text.
    """
    found = [whole.content.find(stop) for stop in record.body["stop"] if stop in whole.content]
    if found:
        whole.content, whole.finish = whole.content[: min(found)], "stop"
    return whole


def _completed(record: Record, shown: Choice) -> Choice:
    """Complete the tokens of the prompt and of the response, as the gateway does it."""
    plan = plan_of(record.body, Dialect.COMPLETIONS, Resume.EXACT, lambda: False)
    sent = TokenRecord(Dialect.COMPLETIONS, lambda _: True, 0 if plan is None else plan.overlap)
    for event in record.events:
        sent.take(b"", orjson.loads(orjson.dumps(event)))
    rest = ContinuedCompletion(sent, {**record.body, "stream": True, "return_token_ids": True}, 1 << 20)
    response = record.client.post(COMPLETIONS, content=rest.body("tiny"), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    joined = _copy(shown)
    for data in map(data_of, split(rest.feed(response.content))):
        for choice in orjson.loads(data)["choices"] if data != b"[DONE]" else ():
            joined.add({**choice, "token_ids": None})
    return joined


def by_replaced_prompt(record: Record, index: int, _: random.Random) -> Choice:
    """Request the chat again, with token IDs instead of its messages."""
    shown = record.choices[index]
    if record.row.path != CHAT:
        raise ImpossibleError
    replaced = {"kv_transfer_params": {"prompt_token_ids": record.prompt + shown.ids}}
    [rest] = record.post(CHAT, {**record.body, **record.remaining(len(shown.ids)), **replaced, "n": 1})["choices"]
    joined = _copy(shown)
    joined.add({**rest, "token_ids": None})
    return joined


def from_the_start(record: Record, index: int, _: random.Random) -> Choice:
    """Generate the whole response again, which must start with the sent part."""
    return recorded(record.client, record.row, streamed(record.client, record.row.path, record.body)).choices[index]


PATHS: Mapping[str, Continue] = {
    "token IDs": by_token_ids,
    "replaced prompt": by_replaced_prompt,
    "from the start": from_the_start,
}


def _copy(choice: Choice) -> Choice:
    """Return an equal choice without token IDs, to which the rest can be added."""
    return Choice(choice.content, choice.reasoning, [[*each] for each in choice.calls], [*choice.call_ids], [*choice.logprobs])


def streamed(client: httpx2.Client, path: str, body: Json) -> list[Json]:
    """Return the events of a stream. Chats and completions have token IDs, the others cannot."""
    more = {"return_token_ids": True} if path in (CHAT, COMPLETIONS) else {}
    response = client.post(path, json={"model": "tiny", **body, "stream": True, **more})
    assert response.status_code == 200, response.text
    data = (block.split("data: ", 1)[1] for block in response.text.removesuffix("\n\n").split("\n\n"))
    return [json.loads(each) for each in data if each != "[DONE]"]


def recorded(client: httpx2.Client, row: Row, events: Sequence[Json]) -> Record:
    """Return what the events show."""
    prompt: list[int] = []
    choices: Choices = {}
    for event in events:
        parts = event.get("choices", []) if row.path in (CHAT, COMPLETIONS) else _translated(event)
        for part in parts:
            choices.setdefault(part["index"], Choice()).add(part)
            prompt = event.get("prompt_token_ids") or part.get("prompt_token_ids") or prompt
    return Record(client, row, {"model": "tiny", **row.body}, events, prompt, choices)


def _translated(event: Json) -> list[Json]:
    """Return an event of /v1/messages or /v1/responses as a choice of a chat."""
    kind, delta, part = event["type"], event.get("delta"), event.get("content_block") or event.get("item") or {}
    if kind in ("content_block_start", "response.output_item.added") and part["type"] in ("tool_use", "function_call"):
        return [_called({"id": "", "function": {"name": part["name"]}})]
    if isinstance(delta, str):
        name = {"response.output_text.delta": "content", "response.reasoning_text.delta": "reasoning"}.get(kind)
        return [{"index": 0, "delta": {name: delta}}] if name else [_called({"function": {"arguments": delta}})]
    if kind == "content_block_delta" and delta:
        found = {"content": delta.get("text"), "reasoning": delta.get("thinking")}
        return [_called({"function": {"arguments": delta["partial_json"]}}) if "partial_json" in delta else {"index": 0, "delta": found}]
    finish = {"message_delta": (delta or {}).get("stop_reason"), "response.completed": event.get("response", {}).get("status")}.get(kind)
    return [{"index": 0, "delta": {}, "finish_reason": finish}] if finish else []


def _called(call: Json) -> Json:
    return {"index": 0, "delta": {"tool_calls": [{"index": -1, **call}]}}


def results_of(client: httpx2.Client, row: Row) -> Results:
    """Cut the stream of a row at random positions, continue it by each path, and return the result of each path."""
    dice = random.Random(f"{row.path} {row.feature}")
    events = streamed(client, row.path, row.body)
    undisturbed = recorded(client, row, events).choices
    positions = [dice.randrange(2, len(events) - 1) for _ in range(CUTS)]
    if "stop" in row.body:  # also in the middle of the stop string
        positions += range(max(len(events) - 1 - CUTS, 2), len(events) - 1)
    cuts = [recorded(client, row, events[:position]) for position in positions]
    possible = {name for name, path in PATHS.items() if path is from_the_start or undisturbed[0].ids}
    results = {name: _result(path, cuts, undisturbed, dice) if name in possible else IMPOSSIBLE for name, path in PATHS.items()}
    return {**results, "outcome": _outcome_of(results)}


def _result(path: Continue, cuts: Sequence[Record], undisturbed: Choices, dice: random.Random) -> str:
    try:
        same = [
            path(cut, index, dice).same(undisturbed[index]) for cut in cuts for index in cut.choices if cut.choices[index].finish is None
        ]
    except ImpossibleError:
        return IMPOSSIBLE
    except DifferentError:
        return DIFFERENT
    return EQUAL if all(same) else DIFFERENT


def table(measured: Mapping[tuple[str, str], Results]) -> str:
    """Render the table. ``measured``: the results of each row by API and feature."""
    lines = [f"| {HEADER} |", f"|---|---|{'---|' * len(PATHS)}---|"]
    lines += [f"| `{path}` | {feature} | {' | '.join(results.values())} |" for (path, feature), results in measured.items()]
    return "\n".join(lines)


def stored() -> dict[tuple[str, str], Results]:
    """Return the results of the page."""
    names = [*PATHS, "outcome"]
    return {(path.strip("`"), feature): dict(zip(names, results, strict=True)) for path, feature, *results in rows_of(PAGE, HEADER)}


HEADER = " | ".join(["API", "feature", *PATHS, "outcome"])


def _outcome_of(results: Results) -> str:
    if results["token IDs"] == EQUAL:
        return CONTINUED
    return REGENERATED if results["from the start"] == EQUAL else ENDS


def measured_on(urls: Mapping[Architecture, str]) -> dict[tuple[str, str], Results]:
    """Run all rows on these servers."""
    with ExitStack() as stack:
        clients = {name: stack.enter_context(httpx2.Client(base_url=url, timeout=120)) for name, url in urls.items()}
        return {(row.path, row.feature): results_of(clients[row.architecture], row) for row in ROWS}


def main() -> None:
    """Run all rows on real servers, and write the table."""
    with ExitStack() as stack:
        measured = measured_on({name: stack.enter_context(running(name, flags=flags)).url for name, flags in FLAGS.items()})
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(measured)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
