"""The difference between two outcomes, in words that are safe for a terminal."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.api.usage import Usage
from gateway.recording.comparison import compared, printable, sentences
from gateway.recording.outcome import Outcome, ToolCall

BEFORE = Outcome("req_1", "small", 200, None, "one\ntwo\nthree", (), Usage(3, 2), 0.1, 0.5)


def test_equal_outcomes() -> None:
    assert list(sentences(BEFORE, replace(BEFORE, id="req_2"))) == [
        "Recorded: req_1, model small. Now: req_2, model small.",
        "Status: 200, as recorded.",
        "Text: the same, 13 characters.",
        "Tool calls: none, as recorded.",
        "Tokens: 3 prompt and 2 completion, as recorded.",
        "First byte: 0.100 s, as recorded.",
        "Duration: 0.500 s, as recorded.",
    ]
    assert compared(BEFORE, BEFORE)["same"] == {"status": True, "text": True, "tool_calls": True, "usage": True}


def test_different_outcomes() -> None:
    after = Outcome("req_2", "large", 503, "no server", "one\n2\nthree", (ToolCall("find", "{}"),), None, None, 0.6)
    assert list(sentences(BEFORE, after)) == [
        "Recorded: req_1, model small. Now: req_2, model large.",
        "Status: 200 recorded, 503 now.",
        "Error (now): no server",
        "Text: it differs, 13 characters recorded, 11 now.",
        "  --- recorded",
        "  +++ now",
        "  @@ -1,3 +1,3 @@",
        "   one",
        "  -two",
        "  +2",
        "   three",
        "Tool calls: they differ, 0 recorded, 1 now.",
        "  + find({})",
        "Tokens: 3 prompt and 2 completion recorded, not reported now.",
        "First byte: 0.100 s recorded, none now.",
        "Duration: 0.500 s recorded, 0.600 s now.",
    ]
    assert not any(compared(BEFORE, after)["same"].values())


def test_control_characters_do_not_reach_a_terminal() -> None:
    hostile = "\x1b[31mred\x07\x9b\u202e"
    after = replace(BEFORE, model=hostile, text=hostile, error=hostile, tool_calls=(ToolCall(hostile, hostile),))
    assert all(line.isprintable() for line in sentences(replace(BEFORE, text=hostile + "x"), after))
    assert printable("a\nb") == "a\nb"


def test_a_long_difference_is_cut() -> None:
    after = replace(BEFORE, text="\n".join(map(str, range(1000))))
    lines = list(sentences(BEFORE, after))
    assert len(lines) < 220
    assert any("more lines" in line for line in lines)
