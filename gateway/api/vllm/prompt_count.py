"""The requests by which a server counts the tokens of a prompt that it was sent before, and their responses. Pure.

vLLM counts a prompt without its engine, in these ways:

| route | body | exact for | vLLM serves it |
|---|---|---|---|
| ``/v1/…/render`` | that of the request | chat, completions and responses | with ``--enable-scale-out``, otherwise 403 |
| ``/v1/messages/count_tokens`` | that of the request | messages | always |
| ``/tokenize`` | in the shape of chat or completions | the bodies that are converted here | always |

The rule: a body is converted only if its prompt is certainly the same. Whatever else it contains, ``tokenize_request`` returns None. The
conversion is that of vLLM 0.32 (``construct_input_messages`` in entrypoints/openai/responses/utils.py, ``build_chat_params`` in both
protocol.py). A model of OpenAI's Harmony format (gpt-oss) is an exception: vLLM renders its prompts without the chat template, so only
``render`` counts them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Document = dict[str, Any]


class CountRequest(msgspec.Struct, frozen=True):
    """A request that counts a prompt: the path at the server, and the body without its ``model``."""

    path: str
    body: Document


_SUFFIX = "/render"
_COUNT_TOKENS = "/v1/messages/count_tokens"
_COUNTED: frozenset[str] = frozenset(
    {"model", "messages", "output_config", "system", "thinking", "tool_choice", "tools", "chat_template_kwargs"}
)
_UNSET = (None, "auto")  # values that vLLM does not pass to a chat template
_MEDIA_PAYLOAD = "mm_payload"


def exact_request(path: str, document: Document) -> CountRequest | None:
    """Return the request that counts any body exactly; None for a route without prompts. The server may refuse it (403)."""
    if path == "/v1/messages":
        return CountRequest(_COUNT_TOKENS, {name: value for name, value in document.items() if name in _COUNTED})
    if path not in _CONVERSIONS:
        return None
    return CountRequest(path + _SUFFIX, {**document, "stream": False, "stream_options": None, _MEDIA_PAYLOAD: "none"})


def tokenize_request(path: str, document: Document) -> CountRequest | None:
    """Return the request for ``/tokenize`` that counts this body exactly; None for a body that is not converted, or not valid."""
    if path not in _CONVERSIONS:
        return None
    try:
        return CountRequest("/tokenize", _CONVERSIONS[path](document))
    except (_NotConverted, AttributeError, LookupError, TypeError, ValueError):  # the server refuses it, or reads it in another way
        return None


# The conversions


class _NotConverted(Exception):
    """The body has something that is not converted."""


def _from_completions(document: Document) -> Document:
    _require_absent(document, "suffix", "prompt_embeds", "truncate_prompt_tokens", "kv_transfer_params")
    return {"prompt": _text(document["prompt"]), **_taken(document, ("add_special_tokens",))}


_CHAT_FIELDS = (
    "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "add_special_tokens", "media_io_kwargs",
    "mm_processor_kwargs",
)  # fmt: skip


def _from_chat(document: Document) -> Document:
    _require_absent(document, "documents", "truncate_prompt_tokens", "kv_transfer_params")
    if document.get("tools") and document.get("tool_choice") == "none":
        raise _NotConverted  # --exclude-tools-when-tool-choice-none decides whether the prompt has the tools
    return {**_taken(document, _CHAT_FIELDS), **_template_fields(document, document.get("reasoning_effort"))}


def _from_responses(document: Document) -> Document:
    _require_absent(document, "previous_input_messages", "previous_response_id", "prompt", "media_io_kwargs", "kv_transfer_params")
    instructions, given, tools = document.get("instructions"), document["input"], document.get("tools") or []
    if document.get("truncation") not in (None, "disabled"):
        raise _NotConverted
    if tools and (document.get("tool_choice") == "none" or any(tool["type"] != "function" for tool in tools)):
        raise _NotConverted
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        if given[-1].get("status") in ("in_progress", "incomplete"):
            raise _NotConverted  # the model continues the item
        for item in given:
            _add_item(item, messages)
    reasoning = document.get("reasoning") or {}
    functions = [{"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in tools]
    return {
        "messages": messages,
        "add_special_tokens": True,
        **({"tools": functions} if functions else {}),
        **_template_fields(document, reasoning.get("effort")),
    }


_CONVERSIONS: Mapping[str, Callable[[Document], Document]] = {
    "/v1/chat/completions": _from_chat,
    "/v1/completions": _from_completions,
    "/v1/responses": _from_responses,
}
"""How a request becomes one to count its prompt, by its path at the server."""


def _require_absent(document: Document, *names: str) -> None:
    if any(document.get(name) is not None for name in names):
        raise _NotConverted


def _taken(document: Document, names: tuple[str, ...]) -> Document:
    return {name: document[name] for name in names if document.get(name) is not None}


def _template_fields(document: Document, effort: object) -> Document:
    """Return the arguments of the chat template, with those that vLLM derives from the reasoning effort."""
    fields = dict(document.get("chat_template_kwargs") or {})
    if effort not in _UNSET:
        if "enable_thinking" not in fields:
            fields["enable_thinking"] = effort != "none"
        fields["reasoning_effort"] = effort
    return {"chat_template_kwargs": fields} if fields else {}


def _add_item(item: Document, messages: list[Document]) -> None:
    """Add an item of ``input`` to the messages.

    vLLM joins the reasoning, the text and the tool calls of one turn into one message of the assistant.
    """
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            _add_to_assistant(messages, "content", _only_text(item["content"]))
        case "message":
            messages.append({"role": _text(item.get("role")), "content": _text_parts(item["content"])})
        case "reasoning" if not item.get("encrypted_content"):
            _add_to_assistant(messages, "reasoning", _only_text(item.get("content")))
        case "function_call" if not item.get("namespace"):
            call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call]})
        case "function_call_output":
            messages.append({"role": "tool", "content": _text(item["output"]), "tool_call_id": item["call_id"]})
        case _:
            raise _NotConverted


def _add_to_assistant(messages: list[Document], name: str, text: str) -> None:
    if messages and messages[-1]["role"] == "assistant" and name not in messages[-1]:
        messages[-1][name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _NotConverted
    return value


def _only_text(content: object) -> str:
    """Return the text of an assistant's content with one part."""
    return _text(content[0]["text"] if isinstance(content, list) and len(content) == 1 else content)


def _text_parts(content: object) -> str | list[Document]:
    """Return text, or parts of text, in the shape of chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(part["type"] not in ("input_text", "text") for part in content):
        raise _NotConverted
    return [{"type": "text", "text": part["text"]} for part in content]


# The responses


class _Counted(msgspec.Struct, gc=False):
    count: int | None = None
    input_tokens: int | None = None
    token_ids: list[int] | None = None

    def prompt(self) -> int | None:
        if self.token_ids is not None:
            return len(self.token_ids)
        return self.input_tokens if self.count is None else self.count


_decode = msgspec.json.Decoder(_Counted | list[_Counted]).decode


def read_count(body: bytes) -> int | None:
    """Return the tokens of the prompt from a response to such a request; None if it has no count."""
    try:
        found = _decode(body)
    except msgspec.DecodeError:
        return None
    counts = [each.prompt() for each in (found if isinstance(found, list) else [found])]
    known = [count for count in counts if count is not None and count > 0]
    return sum(known) if known and len(known) == len(counts) else None
