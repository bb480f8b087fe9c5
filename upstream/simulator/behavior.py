"""The behavior of the simulator, including its failures: one table, set for the server by ``--sim-…`` flags or for one request.

Owns the settings. Each setting is declared once, below, and is both a flag (``--sim-hang-after 5``) and a field of a
request's top-level ``"simulate"`` object (``{"hang_after": 5}``), which vLLM would ignore as an unknown field.
The request's word wins over the server's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter


def setting(default: Any, meaning: str) -> Any:
    """Declare a field whose flag documents it."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class Behavior:
    """The settings of one answer. Times are in seconds, tokens are completion tokens of the whole request."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tokens: int | None = setting(None, "completion tokens of an answer, its end token included (default: 24 to 72, by the prompt)")
    reasoning_tokens: int | None = setting(None, "how many of them are reasoning, when there is any (default: a third, at most 16)")
    preface: str | None = setting(None, "a paragraph with which the text of each answer begins, beside the tokens above")
    tool_calls: int = setting(1, "tools called where the request lets the model choose; 0 answers with text")
    tokens_per_second: float = setting(200.0, "speed of each choice; 0 is as fast as it goes")
    time_to_first_token: float = setting(0.0, "wait before the first token")
    status: int | None = setting(None, "refuse with this HTTP status, e.g. 503")
    error_first: bool = setting(False, "an error as the first event of a stream (not streamed: status 500)")
    error_after: int | None = setting(None, "the engine fails after this many tokens")
    abort_after: int | None = setting(None, "end with finish_reason abort after this many tokens")
    hang_before_headers: bool = setting(False, "take the request and never answer")
    hang_after: int | None = setting(None, "fall silent after this many tokens; 0: after the headers of a stream")
    cut_before_headers: bool = setting(False, "close the connection with nothing answered")
    cut_after: int | None = setting(None, "close the connection after this many events; 0: after the headers")
    cut_bytes: int | None = setting(None, "close the connection after this many bytes of the body")
    die_after: int | None = setting(None, "the process exits after this many tokens of the request")
    chunk_bytes: int | None = setting(None, "cut the body into HTTP chunks of this many bytes, also in the middle of events")


_ADAPTER = TypeAdapter(Behavior)


def for_request(server: Behavior, given: Mapping[str, Any] | None) -> Behavior:
    """Return the server's settings, overridden by those of a request. Raises pydantic.ValidationError for a misspelled field."""
    if not given:
        return server
    return _ADAPTER.validate_python({**dataclasses.asdict(server), **given})
