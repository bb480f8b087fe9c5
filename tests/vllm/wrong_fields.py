"""Requests with exactly one mistake each, on every JSON route: the corpus for the test of error messages.

``WRONG_FIELDS``: one field is wrong or missing, at a known path, which the error's message must name. ``WRONG_REQUESTS``: no field is
wrong, but the request itself is; the message must state the cause. Bodies of the first lack ``model``, which the test adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.support.running import KEY
from tests.vllm.dialogues import Json

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
EMBEDDINGS, RERANK, SCORE, CLASSIFY, POOLING = "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BATCH, COHERE = "/v1/chat/completions/batch", "/v2/embed"

GENERATING = (CHAT, BATCH, COMPLETIONS, RESPONSES, MESSAGES, COUNT, TOKENIZE, DETOKENIZE)
"""Routes of a generating model. The other routes need a pooling model."""


@dataclass(frozen=True, slots=True)
class WrongField:
    """A request whose only mistake is at ``path``: segments joined by dots, list indices from 0. ``message`` is the whole error message."""

    route: str
    path: str
    body: Json
    message: str | None = None


def _rows(route: str, base: Json, *cases: tuple[str, Json] | tuple[str, Json, str]) -> list[WrongField]:
    return [WrongField(route, path, {**base, **fields}, *message) for path, fields, *message in cases]


def _without(body: Json, name: str) -> Json:
    return {field: value for field, value in body.items() if field != name}


def _message(**fields: Any) -> Json:
    """Return one user message with these fields."""
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


def _parts(*parts: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def _rounds(*messages: Json) -> Json:
    return {"messages": [{"role": "user", "content": "Hi"}, *messages]}


def _calls(**call: Any) -> Json:
    """Return a conversation with one tool call of the model."""
    whole = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return _rounds(
        {"role": "assistant", "content": None, "tool_calls": [{name: value for name, value in whole.items() if value is not ...}]}
    )


def _tool(**function: Any) -> Json:
    return {"tools": [{"type": "function", "function": function}]}


_HI: Json = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
_TOOL: Json = _tool(name="f", parameters={"type": "object", "properties": {}})
_PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

_CHAT = _rows(
    CHAT,
    _HI,
    ("messages", {"messages": "Hi"}),
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages.0", {"messages": ["Hi"]}),
    ("messages.0.role", {"messages": [{"content": "Hi"}]}),
    ("messages.0.role", _message(role=5)),
    ("messages.1.role", _rounds({"role": "narrator", "content": "Hi"})),
    ("messages.0.content", _message(content=5)),
    ("messages.0.content", _message(content=None)),
    ("messages.0.content", _message(content={"type": "text", "text": "Hi"})),
    ("messages.0.content.0", _parts("Hi", 5)),
    ("messages.0.content.0.text", _parts({"type": "text"})),
    ("messages.0.content.0.text", _parts({"type": "text", "text": 5})),
    ("messages.0.content.0.type", _parts({"type": "note", "note": "Hi"})),
    ("messages.0.content.0.type", _parts({"text": "Hi"})),
    ("messages.0.content.1.image_url", _parts({"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": _PNG})),
    ("messages.0.content.0.image_url.url", _parts({"type": "image_url", "image_url": {}})),
    ("messages.0.content.0.image_url", _parts({"type": "image_url"})),
    ("messages.0.content.0.input_audio", _parts({"type": "input_audio", "input_audio": "UklGRg=="})),
    ("messages.1.content", _rounds({"role": "tool", "tool_call_id": "a", "content": 5})),
    ("messages.1.tool_calls.0.id", _calls(id=...)),
    ("messages.1.tool_calls.0.function", _calls(function=...)),
    ("messages.1.tool_calls.0.function.name", _calls(function={"arguments": "{}"})),
    ("messages.1.tool_calls.0.function.arguments", _calls(function={"name": "f", "arguments": {"a": 1}})),
    ("messages.1.tool_calls", _rounds({"role": "assistant", "content": None, "tool_calls": 5})),
    ("messages.0.name", _message(name=5)),
    ("tools", {"tools": "f"}),
    ("tools", {"tools": []}),
    ("tools.0", {"tools": ["f"]}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.function.name", _tool(parameters={"type": "object"})),
    ("tools.0.function.parameters", _tool(name="f", parameters="{}")),
    ("tools.0.type", {"tools": [{"type": "web_search", "function": {"name": "f"}}]}),
    ("tool_choice", {**_TOOL, "tool_choice": "sometimes"}),
    ("tool_choice", {**_TOOL, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice.function", {**_TOOL, "tool_choice": {"type": "function"}}),
    ("tool_choice.function.name", {**_TOOL, "tool_choice": {"type": "function", "function": {}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 9}),
    ("top_p", {"top_p": 2}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_completion_tokens", {"max_completion_tokens": 100_000}),
    ("n", {"n": "two"}),
    ("stop", {"stop": 5}),
    ("stop.1", {"stop": ["a", 1]}),
    ("seed", {"seed": "today"}),
    ("presence_penalty", {"presence_penalty": 5}),
    ("frequency_penalty", {"frequency_penalty": "low"}),
    ("logit_bias", {"logit_bias": "none"}),
    ("logit_bias.5", {"logit_bias": {"5": "much"}}),
    ("logprobs", {"logprobs": "some"}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 50}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("response_format", {"response_format": "json"}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}),
    (
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
    ),
    ("structured_outputs.choice", {"structured_outputs": {"choice": 5}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "((("}}),
    ("reasoning_effort", {"reasoning_effort": "extreme"}),
    ("stream", {"stream": "perhaps"}),
    ("stream_options", {"stream": True, "stream_options": "usage"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("chat_template_kwargs", {"chat_template_kwargs": "thinking"}),
    ("top_k", {"top_k": "all"}),
    ("min_p", {"min_p": 5}),
    ("repetition_penalty", {"repetition_penalty": -1}),
    ("parallel_tool_calls", {"parallel_tool_calls": "rarely"}),
)

_BATCH = _rows(
    BATCH,
    {"messages": [_HI["messages"]], "max_tokens": 4},
    ("messages", {"messages": "Hi"}),
    ("messages.0", {"messages": ["Hi"]}),
    ("messages.1", {"messages": [_HI["messages"], []]}),
    ("messages.1.0", {"messages": [_HI["messages"], ["Hi"]]}),
    ("messages.0.0.role", {"messages": [[{"content": "Hi"}]]}),
    ("messages.0.0.content", {"messages": [[{"role": "user", "content": 5}]]}),
    ("messages.1.0.role", {"messages": [_HI["messages"], [{"role": 5, "content": "Hi"}]]}),
    ("messages.0.0.name", {"messages": [[{"role": "user", "content": "Hi", "name": 5}]]}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 9}),
    ("max_tokens", {"max_tokens": 0}),
    ("n", {"n": 2}),
    ("stop", {"stop": 5}),
    ("seed", {"seed": "today"}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
)

_COMPLETIONS = _rows(
    COMPLETIONS,
    {"prompt": "Hi", "max_tokens": 4},
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"text": "Hi"}}),
    ("prompt", {"prompt": ""}),
    ("prompt.0", {"prompt": [1.5]}),
    ("prompt.1", {"prompt": ["Hi", 5]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": [99999999]}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -1}),
    ("max_tokens", {"max_tokens": -5}),
    ("max_tokens", {"max_tokens": 100_000}),
    ("logprobs", {"logprobs": -5}),
    ("logprobs", {"logprobs": 50}),
    ("stop", {"stop": {"a": 1}}),
    ("suffix", {"suffix": 5}),
    ("echo", {"echo": "loud"}),
    ("best_of", {"best_of": "two"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("min_tokens", {"min_tokens": 9}),
)

_RESPONSES = _rows(
    RESPONSES,
    {"input": "Hi", "max_output_tokens": 4},
    ("input", {"input": 5}),
    ("input", {"input": None}),
    ("input.0", {"input": [5]}),
    ("input.0.content", {"input": [{"role": "user"}]}),
    ("input.0.role", {"input": [{"role": "narrator", "content": "Hi"}]}),
    ("input.0.content.0.text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input.0.content.0.type", {"input": [{"role": "user", "content": [{"type": "note", "text": "Hi"}]}]}),
    ("input.0.type", {"input": [{"type": "note", "text": "Hi"}]}),
    ("input.1.call_id", {"input": [{"role": "user", "content": "Hi"}, {"type": "function_call", "name": "f", "arguments": "{}"}]}),
    ("input.1.name", {"input": [{"role": "user", "content": "Hi"}, {"type": "function_call", "call_id": "a", "arguments": "{}"}]}),
    ("input.0.role", {"input": [{"type": "message", "role": "narrator", "content": "Hi"}]}),
    ("instructions", {"instructions": 5}),
    ("max_output_tokens", {"max_output_tokens": "many"}),
    ("max_output_tokens", {"max_output_tokens": 100_000}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 9}),
    ("top_p", {"top_p": "most"}),
    ("tools", {"tools": "f"}),
    ("tools.0.name", {"tools": [{"type": "function", "parameters": {}, "strict": False}]}),
    ("tools.0.type", {"tools": [{"type": "magic"}]}),
    ("tool_choice", {"tool_choice": "sometimes"}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
    ("metadata", {"metadata": "none"}),
    ("truncation", {"truncation": "some"}),
    ("previous_response_id", {"previous_response_id": "resp_0"}),
    ("include", {"include": "all"}),
    ("top_logprobs", {"top_logprobs": "two"}),
)

_MESSAGES = _rows(
    MESSAGES,
    _HI,
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": "Hi"}),
    ("messages", {"messages": []}),
    ("messages.0.role", _message(role="narrator")),
    ("messages.0.content", _message(content=5)),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content.0.type", _parts({"type": "note"})),
    ("messages.0.content.0.type", _parts({"text": "Hi"})),
    ("messages.0.content.0.text", _parts({"type": "text", "text": 5})),
    ("messages.0.content.0.source", _parts({"type": "image", "source": "x"})),
    ("system", {"system": 5}),
    ("system.0.type", {"system": [{"text": "Hi"}]}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": 9}),
    ("top_p", {"top_p": "most"}),
    ("top_p", {"top_p": 5}),
    ("top_k", {"top_k": "all"}),
    ("stop_sequences", {"stop_sequences": "x"}),
    ("stop_sequences.0", {"stop_sequences": [5]}),
    ("tools", {"tools": "f"}),
    ("tools.0.name", {"tools": [{"input_schema": {"type": "object"}}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": "{}"}]}),
    ("tool_choice.type", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "sometimes"}}),
    ("tool_choice.name", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ("thinking.type", {"thinking": {"type": "much"}}),
    ("metadata", {"metadata": "none"}),
)

_COUNT = _rows(
    COUNT,
    _without(_HI, "max_tokens"),
    ("messages", {"messages": "Hi"}),
    ("messages.0", {"messages": ["Hi"]}),
    ("messages.0.role", {"messages": [{"content": "Hi"}]}),
    ("messages.0.role", _message(role=5)),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content.0.type", _parts({"type": "note"})),
    ("messages.0.content.0.text", _parts({"type": "text", "text": []})),
    ("system", {"system": 5}),
    ("tools", {"tools": "f"}),
    ("tools.0.name", {"tools": [{"input_schema": {}}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
    ("tool_choice.type", {"tool_choice": {}}),
    ("thinking.type", {"thinking": {"type": "much"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": []}),
)

_TOKENIZE = _rows(
    TOKENIZE,
    {"prompt": "Hi"},
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ["Hi"]}),
    ("add_special_tokens", {"add_special_tokens": "perhaps"}),
    ("return_token_strs", {"return_token_strs": 5}),
) + _rows(
    TOKENIZE,
    {"messages": [{"role": "user", "content": "Hi"}]},
    ("messages", {"messages": "Hi"}),
    ("messages.0.role", {"messages": [{"content": "Hi"}]}),
    ("messages.0.content", _message(content=5)),
    ("messages.0.content.0.text", _parts({"type": "text"})),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.function.name", _tool(description="x")),
    ("add_generation_prompt", {"add_generation_prompt": "perhaps"}),
)

_DETOKENIZE = _rows(
    DETOKENIZE,
    {},
    ("tokens", {}),
    ("tokens", {"tokens": "5"}),
    ("tokens", {"tokens": 5}),
    ("tokens", {"tokens": None}),
    ("tokens", {"tokens": {"0": 5}}),
    ("tokens.0", {"tokens": ["a"]}),
    ("tokens.1", {"tokens": [5, -1]}),
    ("tokens.0", {"tokens": [1.5]}),
    ("tokens.2", {"tokens": [5, 6, None]}),
    ("tokens.0", {"tokens": [[5]]}),
)


def _input(route: str) -> list[WrongField]:
    """Return the mistakes that the routes with ``input`` or ``messages`` share."""
    return _rows(
        route,
        {"input": "Hi"},
        ("input", {"input": 5}),
        ("input", {"input": None}),
        ("input", {"input": {"text": "Hi"}}),
        ("input.0", {"input": [1.5]}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": "all"}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": -9}),
        ("truncation_side", {"truncation_side": "middle"}),
        ("add_special_tokens", {"add_special_tokens": "perhaps"}),
        ("user", {"user": 5}),
        ("use_activation", {"use_activation": "perhaps"}),
        ("padding", {"padding": "much"}),
    ) + _rows(
        route,
        {"messages": [{"role": "user", "content": "Hi"}]},
        ("messages", {"messages": "Hi"}),
        ("messages.0.role", {"messages": [{"content": "Hi"}]}),
        ("messages.0.content", _message(content=5)),
    )


_EMBEDDINGS = _input(EMBEDDINGS) + _rows(
    EMBEDDINGS,
    {"input": "Hi"},
    ("encoding_format", {"encoding_format": "hex"}),
    ("dimensions", {"dimensions": "few"}),
    ("dimensions", {"dimensions": 3}),
    ("normalize", {"normalize": True}),
    ("input", {"input": [99999999]}),
)

_COHERE = _rows(
    COHERE,
    {"texts": ["Hi"]},
    ("texts", {"texts": 5}),
    ("texts", {"texts": []}),
    ("texts", {"texts": None}),
    ("texts.1", {"texts": ["Hi", 5]}),
    ("images", {"images": 5}),
    ("inputs", {"inputs": 5}),
    ("embedding_types", {"embedding_types": "float"}),
    ("embedding_types.0", {"embedding_types": ["hex"]}),
    ("truncate", {"truncate": "MIDDLE"}),
    ("output_dimension", {"output_dimension": "few"}),
    ("output_dimension", {"output_dimension": 3}),
    ("max_tokens", {"max_tokens": "few"}),
) + _rows(
    COHERE,
    {},
    ("inputs.0.content", {"inputs": [{}]}),
    ("inputs.0.content.0.type", {"inputs": [{"content": [{"text": "Hi"}]}]}),
    ("inputs.0.content.0.text", {"inputs": [{"content": [{"type": "text"}]}]}),
)

_RERANK = _rows(
    RERANK,
    {"query": "Hi", "documents": ["a", "b"]},
    ("query", {"query": 5}),
    ("query", {"query": None}),
    ("documents", {"documents": 5}),
    ("documents", {"documents": None}),
    ("documents.1", {"documents": ["a", 5]}),
    ("documents", {"documents": []}),
    ("top_n", {"top_n": "two"}),
    ("top_n", {"top_n": -1}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": "all"}),
    ("truncation_side", {"truncation_side": "middle"}),
    ("max_tokens_per_doc", {"max_tokens_per_doc": "few"}),
    ("use_activation", {"use_activation": "perhaps"}),
)

_SCORE = _rows(
    SCORE,
    {"text_1": "Hi", "text_2": ["a", "b"]},
    ("text_1", {"text_1": 5}),
    ("text_1", {"text_1": None}),
    ("text_2", {"text_2": 5}),
    ("text_2", {"text_2": None}),
    ("text_2.1", {"text_2": ["a", 5]}),
    ("text_2", {"text_2": []}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": "all"}),
    ("truncation_side", {"truncation_side": "middle"}),
    ("max_tokens_per_query", {"max_tokens_per_query": "few"}),
    ("use_activation", {"use_activation": "perhaps"}),
    ("instruction", {"instruction": 5}),
    ("user", {"user": 5}),
) + _rows(SCORE, {"queries": "Hi"}, ("documents", {"documents": 5}))

_POOLING = _input(POOLING) + _rows(
    POOLING,
    {"input": "Hi"},
    ("encoding_format", {"encoding_format": "hex"}),
    ("task", {"task": "sing"}),
    ("normalize", {"normalize": True}),
)

# Values for which vLLM reports more than one finding, with the whole message: it has only the finding of the type that the client sent

_AT_MOST_FOUR = "stop: List should have at most 4 items after validation, not 5"
_NEGATIVE = "Input should be greater than or equal to 0"
_TEXT, _LIST, _OBJECT = "Input should be a valid string", "Input should be a valid list", "Input should be an object"
_FORMATS = "encoding_format: Input should be 'float', 'base64', 'bytes' or 'bytes_only'"
_EMPTY = "Input must not be empty."
_FIVE = ["a", "b", "c", "d", "e"]


def _unions(route: str, field: str) -> list[WrongField]:
    """Return the mistakes in a field that takes a text, token IDs, and lists of both."""
    return _rows(
        route,
        {},
        (field, {field: []}, f"{field}: {_EMPTY}"),
        (field, {field: [[]]}, f"{field}: {_EMPTY}"),
        (f"{field}.1.0", {field: [[1], ["a"]]}, f"{field}.1.0: Input should be a valid integer"),
        (f"{field}.1", {field: ["a", 5]}, f"{field}.1: {_TEXT}"),
        (f"{field}.2", {field: ["a", "b", None]}, f"{field}.2: {_TEXT}"),
        (f"{field}.1", {field: [5, "a"]}, f"{field}.1: Input should be a valid integer"),
        (f"{field}.1", {field: [5, [6]]}, f"{field}.1: Input should be a valid integer"),
        (f"{field}.1", {field: [[5], 6]}, f"{field}.1: {_LIST}"),
        (f"{field}.0", {field: [1.5]}),
        (f"{field}.0", {field: [None]}),
    )


_UNIONS = (
    *_unions(COMPLETIONS, "prompt"),
    *_rows(
        COMPLETIONS,
        {"prompt": "Hi"},
        ("prompt.0", {"prompt": [-3]}, f"prompt.0: {_NEGATIVE}"),
        ("prompt.0.0", {"prompt": [[-3]]}, f"prompt.0.0: {_NEGATIVE}"),
        ("prompt.1.0", {"prompt": [[1, 2], [-3]]}, f"prompt.1.0: {_NEGATIVE}"),
        ("prompt", {"prompt": [""]}, f"prompt: {_EMPTY}"),
        ("stop", {"stop": _FIVE}, _AT_MOST_FOUR),
        ("seed", {"seed": 2**70}, "The field 'seed' has an integer of more than 64 bits."),
        ("seed", {"seed": 2**63}, "seed: Input should be less than or equal to 9223372036854775807"),
        (
            "response_format.json_schema",
            {"response_format": {"type": "json_schema", "json_schema": "x"}},
            f"response_format.json_schema: {_OBJECT}",
        ),
        ("response_format.type", {"response_format": {}}, "response_format.type: Field required"),
        (
            "structured_outputs.json",
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json: Input should be a valid string or an object",
        ),
    ),
    *_rows(
        CHAT,
        _HI,
        ("stop", {"stop": _FIVE}, _AT_MOST_FOUR),
        ("stop.0", {"stop": [["a"]]}, f"stop.0: {_TEXT}"),
        ("stop", {"stop": {"a": "b"}}, "stop: Input should be a valid string or a valid list"),
        ("messages.0.content.0", _message(content=["Hi"]), f"messages.0.content.0: {_OBJECT}"),
        ("messages.0.tool_calls", {"messages": [{"role": "assistant", "tool_calls": "x"}]}, f"messages.0.tool_calls: {_LIST}"),
        ("repetition_detection", {"repetition_detection": "x"}, f"repetition_detection: {_OBJECT}"),
        ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 0}),
    ),
    *_rows(BATCH, {"messages": [_HI["messages"]]}, ("stop", {"stop": _FIVE}, _AT_MOST_FOUR)),
    *_rows(
        RESPONSES,
        {"input": "Hi"},
        ("input", {"input": []}, f"input: {_EMPTY}"),
        ("input", {"input": {"role": "user", "content": "Hi"}}, "input: Input should be a valid string or a valid list"),
        ("max_output_tokens", {"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0."),
        ("stop.1", {"stop": ["a", 5]}, f"stop.1: {_TEXT}"),
        ("input.0.call_id", {"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, f"input.0.call_id: {_TEXT}"),
        (
            "input.0.output",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]},
            "input.0.output: Input should be a valid string or a valid list",
        ),
        (
            "input.0.arguments",
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {"a": 1}}]},
            f"input.0.arguments: {_TEXT}",
        ),
    ),
    *_rows(MESSAGES, _HI, ("messages.0.content", _message(content=[]), f"messages.0.content: {_EMPTY}")),
    *_rows(
        TOKENIZE,
        {},
        ("prompt", {}, "prompt or messages: Field required"),
        ("messages", {"add_special_tokens": True}, "prompt or messages: Field required"),
    ),
    *_unions(EMBEDDINGS, "input"),
    *_rows(
        EMBEDDINGS,
        {},
        ("input", {}, "input or messages: Field required"),
        ("encoding_format", {"input": "Hi", "encoding_format": "xml"}, _FORMATS),
        ("encoding_format", {"input": ["Hi"], "encoding_format": "xml"}, _FORMATS),
        ("encoding_format", {**_message(), "encoding_format": "xml"}, _FORMATS),
        ("dimensions", {"input": "Hi", "dimensions": 1.5}, "dimensions: Input should be a valid integer"),
        ("add_generation_prompt", {**_message(), "add_generation_prompt": "x"}, "add_generation_prompt: Input should be true or false"),
    ),
    *_rows(POOLING, {}, ("input", {}), ("data", {"data": 5}, "data: Data for a plugin is not enabled for this model; ask the operator.")),
    *_rows(RERANK, {"documents": ["a"]}, ("query", {"query": ""}, f"query: {_EMPTY}")),
    *_rows(SCORE, {}, ("queries", {}), ("text_1", {"text_1": [], "text_2": "a"}, f"text_1: {_EMPTY}")),
)

WRONG_FIELDS: tuple[WrongField, ...] = (
    *_CHAT,
    *_BATCH,
    *_COMPLETIONS,
    *_RESPONSES,
    *_MESSAGES,
    *_COUNT,
    *_EMBEDDINGS,
    *_COHERE,
    *_RERANK,
    *_SCORE,
    *_input(CLASSIFY),
    *_POOLING,
    *_TOKENIZE,
    *_DETOKENIZE,
    *_UNIONS,
)


@dataclass(frozen=True, slots=True)
class WrongRequest:
    """Return a request with valid fields: its bytes, and the status, code and message of its error."""

    name: str
    data: bytes
    status: int
    code: str
    texts: str


_GOOD = b'{"model": "tests/tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}'
_HOST = "host: localhost"
_KEY = f"authorization: Bearer {KEY}"
_TYPE = "content-type: application/json"
_FORM = "content-type: multipart/form-data; boundary=b"
AUDIO = "/v1/audio/transcriptions"


def _request(body: bytes = _GOOD, *lines: str, line: str = f"POST {CHAT} HTTP/1.1", length: int | None = None) -> bytes:
    """Return the bytes of a request. ``lines`` replace its host, key and content type."""
    size = len(body) if length is None else length
    head = [line, *(lines or (_HOST, _KEY, _TYPE)), f"content-length: {size}", "connection: close"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _post(path: str, body: bytes, *lines: str) -> bytes:
    return _request(body, *lines, line=f"POST {path} HTTP/1.1")


def _with(*lines: str) -> bytes:
    """Return a request with a valid body and with this host, key and content type."""
    return _request(_GOOD, *lines)


_JSON, _INVALID, _KEYLESS = "invalid_json", "invalid_request", "invalid_api_key"

WRONG_REQUESTS: tuple[WrongRequest, ...] = (
    WrongRequest("no body", _request(b""), 400, _JSON, "not valid JSON"),
    WrongRequest("a truncated object", _request(_GOOD[:-9]), 400, _JSON, "not valid JSON"),
    WrongRequest("words", _request(b"Hello!"), 400, _JSON, "not valid JSON"),
    WrongRequest("single quotes", _request(_GOOD.replace(b'"', b"'")), 400, _JSON, "not valid JSON"),
    WrongRequest("a trailing comma", _request(_GOOD[:-1] + b",}"), 400, _JSON, "not valid JSON"),
    WrongRequest("NaN", _request(_GOOD.replace(b"4}", b"NaN}")), 400, _JSON, "not valid JSON"),
    WrongRequest("a list", _request(b"[" + _GOOD + b"]"), 400, _JSON, "must be a JSON object"),
    WrongRequest("null", _request(b"null"), 400, _JSON, "must be a JSON object"),
    WrongRequest("UTF-16", _request(_GOOD.decode().encode("utf-16-le")), 400, _JSON, "not valid JSON"),
    WrongRequest("no UTF-8", _request(_GOOD.replace(b"Hi", b"\xff")), 400, _JSON, "not valid JSON"),
    WrongRequest("deep nesting", _request(b'{"a":' + b"[" * 99 + b"]" * 99 + b"}"), 400, _JSON, "nested"),
    WrongRequest("a large integer", _request(_GOOD.replace(b"4}", b"1" * 30 + b"}")), 400, "invalid_value", "'max_tokens' has an integer"),
    WrongRequest("plain text", _with(_HOST, _KEY, "content-type: text/plain"), 415, "unsupported_media_type", "application/json"),
    WrongRequest("a form for JSON", _with(_HOST, _KEY, _FORM), 415, "unsupported_media_type", "application/json"),
    WrongRequest("brotli", _with(_HOST, _KEY, _TYPE, "content-encoding: br"), 415, "unsupported_media_type", "gzip, zstd"),
    WrongRequest("JSON for a form", _post(AUDIO, _GOOD), 415, "unsupported_media_type", "multipart/form-data"),
    WrongRequest(
        "a form without boundary", _post(AUDIO, b"x", _HOST, _KEY, "content-type: multipart/form-data"), 400, "invalid_value", "boundary"
    ),
    WrongRequest("another method", _request(b"", line=f"GET {CHAT} HTTP/1.1"), 405, "method_not_allowed", "POST"),
    WrongRequest("another route", _post("/v1/chat/completion", _GOOD), 404, "not_found", "route"),
    WrongRequest(
        "a route of other models", _post(EMBEDDINGS, b'{"model": "tests/tiny", "input": "Hi"}'), 404, "not_found", "does not serve"
    ),
    WrongRequest("an unknown model", _request(_GOOD.replace(b"tests/", b"no-")), 404, "model_not_found", "`no-tiny` does not exist"),
    WrongRequest("no key", _with(_HOST, _TYPE), 401, "missing_api_key", "Authorization: Bearer"),
    WrongRequest("an unknown key", _with(_HOST, _TYPE, "authorization: Bearer sk-unknown"), 401, _KEYLESS, "not valid"),
    WrongRequest("a quoted key", _with(_HOST, _TYPE, f'authorization: Bearer "{KEY}"'), 401, _KEYLESS, "in quotes"),
    WrongRequest("an unset variable", _with(_HOST, _TYPE, "authorization: Bearer $OPENAI_API_KEY"), 401, _KEYLESS, "placeholder"),
    WrongRequest("a key of Azure's", _with(_HOST, _TYPE, f"api-key: {KEY}"), 401, _KEYLESS, "'api-key' is not read"),
    WrongRequest("no scheme", _with(_HOST, _TYPE, f"authorization: {KEY}"), 401, _KEYLESS, "'Bearer <key>'"),
    WrongRequest("an empty bearer", _with(_HOST, _TYPE, "authorization: Bearer"), 401, "missing_api_key", "no key after 'Bearer'"),
    WrongRequest("a large body", _request(b"", length=10**12), 413, "request_too_large", "larger than"),
    WrongRequest("a large head", _with(_HOST, _KEY, _TYPE, "x-note: " + "x" * 70_000), 431, "headers_too_large", "larger than"),
    WrongRequest("no host", _with(_KEY, _TYPE), 400, _INVALID, "'host'"),
    WrongRequest("two lengths", _with(_HOST, _KEY, _TYPE, "content-length: 5"), 400, _INVALID, "HTTP/1.1"),
    WrongRequest("another encoding", _with(_HOST, _KEY, _TYPE, "transfer-encoding: gzip"), 400, _INVALID, "HTTP/1.1"),
    WrongRequest(
        "a long text",
        _request(_GOOD.replace(b"Hi", b"hello " * 3000)),
        400,
        "context_length_exceeded",
        "2048 tokens",
    ),
)
