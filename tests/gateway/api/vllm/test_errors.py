"""Every error of a server, in the contract's words, and nothing of the inside."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.errors import ERRORS, Refusal, openai_error, render
from gateway.api.routes import ROUTES
from gateway.api.vllm.errors import from_event, from_server
from tests.support.examples import examples
from tests.support.rows import each_row


def own(message: str, kind: str = "BadRequestError", param: str | None = None, code: int = 400) -> dict[str, object]:
    """vLLM's own shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OVERFLOW = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, which exceeds "
    "this limit even without any output tokens. Please reduce the length of the input prompt."
)
CHARACTERS = OVERFLOW.replace("at least 2049 input tokens", "1000058 characters")
TOO_MANY = "max_tokens=80000 cannot be greater than max_model_len=2048. Please request fewer output tokens."
LOGPROBS = "Requested sample logprobs of 50, which is greater than max allowed: 20"

FINDINGS = (
    "2 validation errors:\n  {'type': 'list_type', 'loc': ('body', 'messages'), 'msg': 'Input should be a valid list', 'input': 'secret'}\n"
    "  {'type': 'x', 'loc': ('body', 'stop'), 'msg': \"Value error, it's too long\", 'input': ['secret'], 'ctx': {'error': 'secret'}}"
)

# (status, what vLLM 0.32 said) -> (code, param, message or None for words of ours)
TABLE: dict[str, tuple[int, Any, str, str | None, str]] = {
    "bad JSON": (400, own("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.18'}", "Bad Request", "body.18"),
        "invalid_request", None, ""),
    "a missing field": (400, own("1 validation error:\n  {'type': 'missing'}", "Bad Request", "body.messages"),
        "invalid_value", "messages", ""),
    "what was sent is not said again": (400, own(FINDINGS, "Bad Request", "body.messages"),
        "invalid_value", "messages", "messages: Input should be a valid list; stop: it's too long"),
    "the whole body": (400, own("Field required", "Bad Request", "body"), "invalid_request", None, "Field required"),
    "a field": (400, own("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", param="max_tokens"),
                "invalid_value", "max_tokens", "max_tokens must be at least 1, got 0."),
    "a value with brackets": (400, own("out-of-vocab token ids. (parameter=logit_bias, value=[99999])", param="logit_bias"),
                              "invalid_value", "logit_bias", "logit_bias: out-of-vocab token ids."),
    "no field": (400, own("It is not to be."), "invalid_request", None, "It is not to be."),
    "a template": (400, own("Cannot apply chat template to an empty conversation."), "invalid_value", "messages",
                   "messages: Input must not be empty."),
    "a class in a parameter": (400, own("Wrong.", param="body.messages.0.ChatCompletionUserMessageParam.role"),
                               "invalid_value", "messages.0.role", "messages.0.role: Wrong."),
    "a pooling model": (501, own("The model does not support Chat Completions API", "NotImplementedError", None, 501),
                        "not_found", None, "The model `nope` does not serve this route."),
    "Cohere's": (400, {"message": "n must be 1.", "id": "req_1"}, "invalid_request", None, "n must be 1."),
    "findings and no reason": (400, own("1 validation error for Foo\nnonsense", "Bad Request"), "invalid_request", None,
                               "The request does not have the right shape."),
    "overflow": (400, own(f"{OVERFLOW} (parameter=input_tokens, value=2049)", param="input_tokens"),
        "context_length_exceeded", "messages", OVERFLOW),
    "overflow in characters": (400, own(f"{CHARACTERS} (parameter=input_text, value=1)", param="input_text"),
                               "context_length_exceeded", "messages", CHARACTERS),
    "max_tokens": (400, own(f"{TOO_MANY} (parameter=max_tokens, value=80000)", param="max_tokens"),
        "context_length_exceeded", "max_tokens", TOO_MANY),
    "logprobs": (400, own(f"{LOGPROBS} (parameter=logprobs, value=50)", param="logprobs"), "invalid_value", "logprobs", LOGPROBS),
    "an unknown model": (404, own("The model `nope` does not exist. Valid aliases: secret.", "NotFoundError", "model", 404),
        "model_not_found", "model", ""),
    "an engine that died": (500, own("EngineCore encountered an issue.", "InternalServerError", None, 500), "server_error", None,
                            "The model's server failed."),
    "overload": (503, own("Too many queued requests", "Service Unavailable", None, 503),
        "overloaded", None, "The model's server is overloaded."),
    "our key": (401, {"error": "Unauthorized"}, "server_error", None, "The model's server refused the gateway."),
    "forbidden": (403, {"detail": "no"}, "server_error", None, "The model's server refused the gateway."),
    "FastAPI": (400, {"detail": "There was an error parsing the body"}, "invalid_request", None, "There was an error parsing the body"),
    "FastAPI's list": (422, {"detail": [{"loc": ["body", "tools", 0, "name"], "type": "missing",
                                              "msg": "Field required", "input": "secret"}]},
                       "missing_required_parameter", "tools.0.name", "tools.0.name: Field required"),
    "another list of FastAPI's": (422, {"detail": ["x", {"loc": "x"}]}, "invalid_request", None, "The request is not valid."),
    "Anthropic's": (400, {"type": "error", "error": {"type": "BadRequestError",
                                                     "message": f"{TOO_MANY} (parameter=max_completion_tokens, value=8)"}},
                    "context_length_exceeded", None, TOO_MANY),
    "too large": (413, {"detail": "Payload too large"}, "request_too_large", None, "Payload too large"),
    "media type": (415, {}, "unsupported_media_type", None, "The content type is not supported."),
    "a redirect": (307, {}, "server_error", None, "The model's server failed."),
    "an odd status": (999, {}, "server_error", None, "The model's server failed."),
    "an array": (400, [1], "invalid_request", None, "The request is not valid."),
}  # fmt: skip


@each_row("name", TABLE)
def test_the_table(name: str) -> None:
    status, body, code, param, message = TABLE[name]
    refusal = from_server(status, orjson.dumps(body), "nope", "messages")
    assert (refusal.code, refusal.param) == (code, param)
    assert refusal.message and (not message or refusal.message == message)
    assert "secret" not in refusal.message and "(parameter=" not in refusal.message
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("code") == status:
        assert openai_error(from_event(error, "nope", "messages")) == openai_error(refusal), "the same in a stream"


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b'{"error":{"message":5,"type":[],"param":{}}}', b'{"error":null}', b"[" * 5000])
def test_a_body_that_says_nothing(body: bytes) -> None:
    assert from_server(400, body, "m", "prompt").message == "The request is not valid."


INSIDE = st.sampled_from(
    ["10.0.0.5:8000", "192.168.1.17", "http://vllm-0.internal:8000/v1", "https://x/y", "unix:/run/vllm.sock", "/opt/vllm/engine.py",
     "/home/vllm/.cache/huggingface/hub/m", "tcp://127.0.0.1:5557", "ipc:///tmp/a-b-c"]
)  # fmt: skip


@settings(deadline=None)
@given(st.text(max_size=30), INSIDE, st.text(max_size=30), st.integers(400, 499), st.none() | st.text(max_size=20))
def test_internals_are_removed(before: str, inside: str, after: str, status: int, param: str | None) -> None:
    refusal = from_server(status, orjson.dumps(own(f"{before} {inside} {after}", param=param)), "m", "prompt")
    assert inside not in refusal.message
    assert not any(
        part in refusal.message for part in ("10.0.0.5", "192.168.1.17", "vllm-0", "/run/", "/opt/", ".cache", "127.0.0.1", "ipc:")
    )


@settings(deadline=None)
@given(st.integers(100, 999), st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["error", "detail", "message", "type", "param", "code"]), inner)))  # fmt: skip
def test_any_error_body_is_mapped(status: int, document: object) -> None:
    refusal = from_server(status, orjson.dumps(document), "m", "prompt")
    assert refusal.code in ERRORS and 400 <= refusal.spec.status <= 599 and refusal.message
    assert set(orjson.loads(render(refusal))["error"]) == {"message", "type", "param", "code"}
    if isinstance(document, dict):
        assert from_event(document, "m", "prompt").code in ERRORS


@pytest.mark.parametrize(
    "unit", ["'msg': 'x", " ", "(parameter=a, value=", ")", "/", "/a", "a/", "\n", "1.", "max_model_len", "(parameter="]
)
def test_a_long_message_takes_time_in_proportion(unit: str) -> None:
    def seconds(length: int) -> float:
        text = ("1 validation error:" if "msg" in unit else "x") + unit * (length // len(unit))
        bodies = [orjson.dumps(own(text + end, param="p")) for end in ("", "x", ")", " )x")]

        def once() -> float:
            since = time.thread_time()
            for body in bodies:
                from_server(400, body, "m", "prompt")
            return time.thread_time() - since

        return min(once() for _ in range(3))  # what else is done in this thread, as by the collector of garbage, is not done each time

    seconds(100)
    assert seconds(60_000) < 60 * max(seconds(6_000), 0.001)


def test_a_message_is_bounded() -> None:
    assert len(from_server(400, orjson.dumps(own("x" * 60_000)), "m", "prompt").message) <= 2000
    assert len(from_server(404, b"{}", "m" * 60_000, "prompt").message) <= 300


# A corpus: what the real vLLM 0.32 said to requests with one wrong field each (tests/vllm/test_wrong_fields.py writes it)

CORPUS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "errors.json").read_text())
INTERNALS = re.compile(r"Param\b|Message\b|Request\b|ValidatorIterator|input_value|pydantic|body\.|\[type=|'input'|--[a-z]{2}|VLLM_")


def refusal_of(row: dict[str, Any], *, knows_document: bool = True) -> Refusal:
    field = ROUTES[row["route"]].input_field
    return from_server(400, orjson.dumps(row["error"]), "m", field, None, row["sent"] if knows_document else None)


@each_row("row", CORPUS, ids=lambda row: f"{row['route']} {row['path']}")
def test_the_message_names_the_wrong_field(row: dict[str, Any]) -> None:
    refusal = refusal_of(row)
    assert re.search(rf"(?<![\w.]){re.escape(row['path'])}(?![\w]|\.\w)", refusal.message), refusal.message
    assert INTERNALS.search(refusal.message) is None and INTERNALS.search(refusal.param or "") is None
    assert refusal.param is not None and refusal.message.count(";") <= 1 and len(refusal.message) <= 300
    assert (refusal.code == "missing_required_parameter") == refusal.message.endswith("Field required")
    assert refusal.message == row.get("message", refusal.message)


@each_row("row", CORPUS, ids=lambda row: f"{row['route']} {row['path']}")
def test_nothing_is_invented_where_the_request_is_not_known(row: dict[str, Any]) -> None:
    refusal = refusal_of(row, knows_document=False)
    assert INTERNALS.search(refusal.message) is None and INTERNALS.search(refusal.param or "") is None
    assert refusal.spec.status == 400 and refusal.message


def listed(*findings: tuple[str, str, str], more: int = 0) -> dict[str, object]:
    """An error in the form of vLLM's handler, of (kind, place, reason)."""
    lines = [f"  {{'type': {kind!r}, 'loc': {location!r}, 'msg': {reason!r}, 'input': 'secret'}}" for kind, location, reason in findings]
    lines += [f"  ...and {more} more errors"] if more else []
    return own("\n".join((f"{len(findings) + more} validation errors:", *lines)), "Bad Request", f"body.{findings[0][1]}")


def texted(title: str, *findings: tuple[str, str, str]) -> dict[str, object]:
    """An error in the form of an exception's text."""
    lines = [
        f"{location}\n  {reason} [type={kind}, input_value='secret', input_type=str]\n    For further information visit https://errors.pydantic.dev/x"
        for kind, location, reason in findings
    ]
    return own("\n".join((f"{len(findings)} validation errors for {title}", *lines)))


def test_two_wrong_fields_are_both_named() -> None:
    error = listed(
        ("missing", "body.tools.0.function.name", "Field required"), ("float_parsing", "body.top_p", "Input should be a valid number, x")
    )
    refusal = from_server(400, orjson.dumps(error), "m", "messages", None, {"tools": [{"function": {}}], "top_p": "x"})
    assert refusal.message == "tools.0.function.name: Field required; top_p: Input should be a valid number"
    assert (refusal.code, refusal.param) == ("missing_required_parameter", "tools.0.function.name")


@pytest.mark.parametrize("sent", [{"x": 1}, {"type": "a"}])
def test_a_union_inside_a_branch_that_the_client_did_not_mean(sent: dict[str, object]) -> None:
    """The outer union is first, in each process: it removes all findings of the inner one."""
    outer, inner = (("missing", f"body.input.{path}", "Field required") for path in ("type", "content.type"))
    refusal = from_server(400, orjson.dumps(listed(outer, outer, inner, inner)), "m", "messages", None, {"input": sent})
    assert refusal.message == "input.type: Field required"


def test_the_part_at_fault_is_found_among_others() -> None:
    good = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": [good, {"type": "image_url", "image_url": "data:,"}]}]
    error = texted("ChatCompletionContentPartImageParam", ("dict_type", "image_url", "Input should be a valid dictionary"))
    refusal = from_server(400, orjson.dumps(error), "m", "messages", None, {"messages": messages})
    assert refusal.message == "messages.1.content.1.image_url: Input should be an object"
    batch = from_server(400, orjson.dumps(error), "m", "messages", None, {"messages": [[messages[0]], messages]})
    assert batch.param == "messages.1.1.content.1.image_url", "a batch has a list of messages for each conversation"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages.0.tool_calls.0.function.arguments: The text is not valid JSON."),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}, {"function": {"arguments": "{"}}]}]},
         "messages.0.tool_calls.1.function.arguments: The text is not valid JSON."),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json: The text is not valid JSON."),
        ({"messages": [{"role": "user", "content": "Hi"}]}, None),
    ],
)  # fmt: skip
def test_json_that_cannot_be_read_is_the_clients_or_the_models(document: dict[str, Any], message: str | None) -> None:
    error = own("Expecting property name enclosed in double quotes: line 1 column 2 (char 1)")
    refusal = from_server(400, orjson.dumps(error), "m", "messages", None, document)
    assert refusal.message == message if message else (refusal.code == "server_error" and "output was not valid" in refusal.message)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"messages": 5}, "messages: Input should be a valid list"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": 5}]},
         "messages.1.tool_calls: Input should be a valid list"),
    ],
)  # fmt: skip
def test_the_value_that_is_no_list_is_found(document: dict[str, Any], message: str) -> None:
    error = own("'int' object is not iterable")
    assert from_server(400, orjson.dumps(error), "m", "messages", None, document).message == message


def test_the_part_that_is_no_text_is_found_if_there_is_any() -> None:
    error = own("tiny is not a multimodal model")
    text = {"role": "user", "content": [{"type": "text", "text": "Hi"}, "Hi"]}
    for messages, param in (([text], None), ([text, {"role": "user", "content": [{"type": "image_url"}]}], "messages.1.content.0")):
        assert from_server(400, orjson.dumps(error), "m", "messages", None, {"messages": messages}).param == param


def test_a_message_that_is_not_an_object_is_skipped() -> None:
    error = own("Cannot apply chat template to an empty conversation.")
    for messages, param in ((["x"], "messages"), (["x", {"role": "user", "content": []}], "messages.1.content")):
        assert from_server(400, orjson.dumps(error), "m", "messages", None, {"messages": messages}).param == param


RESPONSES = [
    "AnthropicContentBlock", "AnthropicMessagesResponse", "AnthropicStreamEvent", "ChatCompletionResponse", "ChatCompletionResponseChoice",
    "ChatMessage", "CompletionResponse", "DeltaMessage", "EmbeddingResponse", "FunctionCall", "ResponseFunctionToolCall",
    "ResponseOutputMessage", "ResponseReasoningItem", "ResponsesResponse", "ToolCall", "UsageInfo", "list[FunctionDefinition]",
]  # fmt: skip
REQUESTS = [
    "ChatCompletionContentPartImageParam", "ChatCompletionNamedToolChoiceParam", "ChatCompletionRequest", "ChatCompletionToolsParam",
    "ResponseInputImageParam", "ResponsesRequest", "SamplingParams", "StreamOptions", "StructuredOutputsParams", "ValidatorIterator",
]  # fmt: skip


@each_row("title", RESPONSES)
@each_row("status", [400, 500])
def test_a_response_that_vllm_refuses_is_the_servers_error(title: str, status: int) -> None:
    error = texted(title, ("dict_type", "input", "Input should be a valid dictionary"))
    refusal = from_server(status, orjson.dumps(error), "m", "messages", None, {"messages": []})
    assert (refusal.code, refusal.spec.status, refusal.param) == ("server_error", 500, None)
    assert refusal.message.startswith("The model's output was not valid") and "x-should-retry" not in refusal.headers


@pytest.mark.parametrize("title", REQUESTS)
def test_a_request_that_vllm_refuses_is_the_clients_error(title: str) -> None:
    error = texted(title, ("dict_type", "image_url", "Input should be a valid dictionary"))
    refusal = from_server(400, orjson.dumps(error), "m", "messages", None, {"messages": []})
    assert (refusal.code, refusal.message) == ("invalid_value", "image_url: Input should be an object")


TOOLS = {"tools": [{}], "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
FLAGS = {
    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set': "tools: Tools are {not_enabled}",
    'tool_choice="required" requires --tool-call-parser to be set': "tools: Tools are {not_enabled}",
    "Chat template is passed with request, but --trust-request-chat-template is not set.": "Chat templates in requests are {not_enabled}",
    "thinking_token_budget is set. Please set --reasoning-parser and/or --reasoning-config.": "Bounds on reasoning are {not_enabled}",
    "You must set `--enable-prompt-embeds` to input `prompt_embeds`.": "Embeddings as prompts are {not_enabled}",
    "You must set `--enable-mm-embeds` to input `image_embeds`":
        "messages.0.content.0: Embeddings as images, sounds or videos are {not_enabled}",
    "Try switching the model's pooling_task via --pooler-config.task embed. (parameter=task)": "task: This task is {not_enabled}",
    "Set it by --some-new-flag.": "This request needs a feature that is {not_enabled}",
    "Cannot load local files without `--allowed-local-media-path`.": "This request needs a feature that is {not_enabled}",
    "Replay is not enabled. Start the engine with --enable-trace-replay to use it.": "Replay is not enabled.",
    "n must be at most 64, got 99. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable.":
        "n must be at most 64, got 99.",
    "At most 2 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this limit.":
        "messages.0.content.0: At most 2 image(s) may be provided in one prompt.",
    "At most 0 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this limit. (parameter=image)":
        "messages.0.content.0: This model takes no image parts.",
    "/models/tiny is not a multimodal model": "messages.0.content.0: This model takes text only: no images, sounds or videos.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Model 'inside' does not support Matryoshka embeddings; dimensions must be unset (received dimensions=3).",
         "dimensions: This model's embeddings have one size only, so it can't be set."),
        ("Model 'inside' only supports dimensions in range [1, 128], got 900.", "dimensions: The number must be in the range [1, 128]."),
        ("Model 'inside' only supports Matryoshka dimensions [32, 64], got 9.", "dimensions: The number must be one of [32, 64]."),
    ],
)  # fmt: skip
def test_the_servers_name_for_a_model_stays_inside(text: str, message: str) -> None:
    refusal = from_server(400, orjson.dumps(own(text)), "m", "input", None, {"input": "Hi", "dimensions": 3})
    assert (refusal.code, refusal.message, refusal.param) == ("invalid_value", message, "dimensions")


@each_row("text", FLAGS)
def test_settings_of_the_server_are_the_operators(text: str) -> None:
    not_enabled = "not enabled for this model; ask the operator."
    refusal = from_server(400, orjson.dumps(own(text)), "m", "messages", None, TOOLS)
    assert refusal.message == FLAGS[text].format(not_enabled=not_enabled)
    assert (refusal.code == "feature_not_enabled") == refusal.message.endswith(not_enabled)


def test_what_the_client_sent_is_not_repeated() -> None:
    sent = {"tool_choice": "a secret thing", "structured_outputs": {"regex": "(secret("}, "messages": []}
    drawing = "regex parse error:\n    (secret(\n    ^\nerror: unclosed group\n 1 | (secret("
    for text in (
        "Invalid value for `tool_choice`: a secret thing! Only named tools are supported. (parameter=tool_choice)",
        f'Grammar error: at 1(8): invalid regex "(secret(" (in regex): {drawing}',
        "You can only use one kind of structured outputs constraint but multiple are specified: {'json': 'secret'}",
    ):
        refusal = from_server(400, orjson.dumps(own(text)), "m", "messages", None, sent)
        assert "secret" not in refusal.message and refusal.param in ("tool_choice", "structured_outputs.regex", "structured_outputs")


@pytest.mark.parametrize("unit", ["0.A.b", "A.", "a.", "body.", "'", "0."])
def test_many_findings_about_a_large_request_take_time_in_proportion(unit: str) -> None:
    def seconds(size: int) -> float:
        messages = [{"role": "user", "content": [{"type": "text"}] * 8} for _ in range(size // 8)]
        location = unit * 50
        bodies = [
            orjson.dumps(error)
            for error in (
                listed(*[("missing", f"body.{location}", "Field required")] * 100),
                texted("ValidatorIterator", *[("literal_error", f"0.{location}", "Input should be 'x'")] * 100),
                own("'int' object is not iterable"),
                own("Unexpected message role."),
                own("Expecting value: line 1 column 1 (char 0)"),
            )
        ]

        def once() -> float:
            since = time.thread_time()
            for body in bodies:
                from_server(400, body, "m", "messages", None, {"messages": messages})
            return time.thread_time() - since

        return min(once() for _ in range(3))

    seconds(100)
    assert seconds(60_000) < 60 * max(seconds(6_000), 0.002)


def test_findings_about_the_whole_body_in_several_shapes() -> None:
    error = listed(("missing", "Aaa", "Field required"), ("missing", "Aaa.type", "Field required"))
    assert from_server(400, orjson.dumps(error), "m", "messages", None, {}).message == "type: Field required"


@settings(deadline=None, max_examples=examples(1500))
@given(st.data())
def test_no_report_is_too_strange_for_any_request(data: st.DataObject) -> None:
    names = st.sampled_from(
        ["messages", "0", "1", "content", "tools", "type", "role", "Aaa", "Bbb", "str", "", "a b", "arguments", "function"]
    )
    json_values = st.recursive(
        st.none() | st.integers(0, 3) | st.sampled_from(["Aaa", "text", "user"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=12)  # fmt: skip
    kinds = st.sampled_from(["missing", "dict_type", "literal_error", "string_type", "value_error", "union_tag_invalid", "list_type"])
    findings = data.draw(
        st.lists(st.tuples(kinds, st.lists(names, max_size=5).map(".".join), st.text(max_size=20)), min_size=1, max_size=6)
    )
    document = data.draw(st.dictionaries(names, json_values, max_size=4))
    for error in (listed(*findings), texted("ValidatorIterator", *findings), texted("Aaa", *findings), listed(*findings, more=9)):
        refusal = from_server(400, orjson.dumps(error), "m", "messages", None, document)
        assert refusal.code in ERRORS and refusal.message and "secret" not in refusal.message
        assert "Aaa" not in refusal.message or "Aaa" in json.dumps(document) or any("Aaa" in text for *_, text in findings)
