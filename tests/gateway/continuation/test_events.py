"""The events of a continued stream are those of vLLM."""

from __future__ import annotations

from gateway.continuation.events import closing, event, usage_of

HEAD = {"id": "chatcmpl-1", "model": "m"}
END = b"data: [DONE]\n\n"


def test_an_event_is_written_as_vllm_writes_it() -> None:
    assert event(HEAD) == b'data: {"id":"chatcmpl-1","model":"m"}\n\n'


def test_the_usage_is_written_as_vllm_writes_it() -> None:
    assert usage_of(3, 4) == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
    assert usage_of(3, 4, 2) == {**usage_of(3, 4), "completion_tokens_details": {"reasoning_tokens": 2}}


def test_a_stream_ends_with_its_usage_once() -> None:
    assert closing(HEAD, usage_of(3, 4)) == event({**HEAD, "choices": [], "usage": usage_of(3, 4)}) + END
    assert closing(HEAD, None) == END
