"""Make a real vLLM respond with a text of its prompt, and parse calls as a request wishes. vLLM imports it (server.py, ``REPEATING``).

A tiny model has memorized calls in one syntax only. So a message that starts with ``MARK`` has the response after it, and the description
of the first tool may name the parser of this request.

The rule: the response depends on every token before. If these are not the start of the text, the response is ``WRONG``.
"""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found]
from vllm.parser.engine.adapters import ParserEngineToolAdapter  # type: ignore[import-not-found]
from vllm.tokenizers import get_tokenizer  # type: ignore[import-not-found]
from vllm.tool_parsers import ToolParser, ToolParserManager  # type: ignore[import-not-found]
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates  # type: ignore[import-not-found]

MARK, WRONG = "Repeat:\n", "These are not the first tokens of the text."
_OPENING = "\n<|im_start|>assistant\n<think>\n"
_PLAIN = f"{_OPENING}\n</think>\n\n"


class Repeating(LogitsProcessor):  # type: ignore[misc]
    """Permits the next token of the text only."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        tokenizer = get_tokenizer(vllm_config.model_config.tokenizer)
        self._mark, self._wrong, *self._openings = (
            tokenizer.encode(text, add_special_tokens=False) for text in (MARK, WRONG, _PLAIN, _OPENING)
        )
        self._end = tokenizer.eos_token_id
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the most probable token changes."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Note the requests of a batch, by their row."""
        process_dict_updates(self._rows, batch_update, lambda _, prompt, made: self._rest(prompt, made))

    def _rest(self, prompt: list[int], made: list[int]) -> tuple[list[int], list[int]] | None:
        """Return the tokens to make, and the list of those that were made. None without a text."""
        size = len(self._mark)
        start = next((at + size for at in range(len(prompt)) if prompt[at : at + size] == self._mark), None)
        if start is None:
            return None
        end = prompt.index(self._end, start)
        text, rest = prompt[start:end], prompt[end + 1 :]
        opening = next(each for each in self._openings if rest[: len(each)] == each)
        given = rest[len(opening) :]
        return [*(text[len(given) :] if text[: len(given)] == given else self._wrong), self._end], made

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Permit one token in each row."""
        for row, (rest, made) in self._rows.items():
            logits[row] = -torch.inf
            logits[row, rest[min(len(made), len(rest) - 1)]] = 0
        return logits


@ToolParserManager.register_module("by_request")
class ByRequest(ParserEngineToolAdapter):  # type: ignore[misc]
    """Makes the parser of a request."""

    def __new__(cls, tokenizer: Any, tools: Any = None, **more: Any) -> ToolParser:
        """Return a parser of another class."""
        named = tools[0].function.description if tools else ""
        parser = ToolParserManager.get_tool_parser(named if named in ToolParserManager.list_registered() else "qwen3_coder")
        if issubclass(parser, ParserEngineToolAdapter):
            return parser(tokenizer, tools, **more)
        if named == "llama3_json":  # it looks for this token, which the tokenizer of the qwen3 model lacks
            parser = type("Llama", (parser,), {"bot_token": "<|endoftext|>"})
        return parser(tokenizer, tools)
