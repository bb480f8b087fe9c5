"""Tell reasoning, content and tool calls apart in generated pieces, as the parsers of vLLM do in the text of a model.

The rule: the tokens of a plan, parsed by their pieces alone, have the same kinds. Pure; the state is one parser for each response.
"""

from __future__ import annotations

from typing import Final

from upstream.simulator.text import tokenizer
from upstream.simulator.text.plan import NAME_END, Token, TokenKind

_NEXT: Final = {
    tokenizer.THOUGHT: TokenKind.CONTENT,
    tokenizer.CALL: TokenKind.CALL,
    tokenizer.CALLED: TokenKind.CONTENT,
    tokenizer.END: TokenKind.CONTENT,
}
"""The kind of the tokens after markup."""


class Parser:
    """The part of a response that the next piece belongs to. ``thinking``: the prompt has opened the reasoning."""

    def __init__(self, *, thinking: bool) -> None:
        self._kind = TokenKind.REASONING if thinking else TokenKind.CONTENT
        self._name = ""

    def token(self, piece: str) -> Token:
        """Return the token of the next piece. A call is announced by the token after its name."""
        if piece in _NEXT:
            self._kind, self._name = _NEXT[piece], ""
            return Token(TokenKind.SILENT, "", piece)
        if self._kind is not TokenKind.CALL:
            return Token(self._kind, piece, piece)
        if piece == NAME_END:
            self._kind = TokenKind.ARGUMENTS
            return Token(TokenKind.CALL, self._name, piece)
        self._name += piece
        return Token(TokenKind.SILENT, "", piece)
