"""The shape of a body shows the kind of the request, but no text of the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.body_shape import KEYWORDS, PARTS, SETTINGS, shape
from tests.support.process import configuration, gateway, launched, wait_for, write

CANARY = "canary"

_names = st.sampled_from(sorted(SETTINGS | PARTS)) | st.text(max_size=8).map(lambda text: CANARY + text)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8).map(lambda text: CANARY + text)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(_names, inner, max_size=20), max_leaves=300
)  # fmt: skip


@given(st.dictionaries(_names, _values, max_size=20))
def test_nothing_that_a_client_wrote_is_in_it_and_it_fits_into_a_line(document: dict[str, Any]) -> None:
    text = orjson.dumps(shape(document))
    assert CANARY.encode() not in text
    assert len(text) < 3500


def test_a_long_body_with_long_names_fits_too() -> None:
    document: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100}] * 1000}
    document |= dict.fromkeys(sorted(SETTINGS | PARTS, key=len), 0.123456789)
    assert len(orjson.dumps(shape(document))) < 3500


def test_what_is_shown() -> None:
    document = {
        "model": "qwen",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:…"}}]},
        ],
        "temperature": 0.2,
        "temprature": 0.2,
        "max_tokens": 4111_1111_1111_1111,
        "reasoning_effort": "ada",
        "stop": ["a", "b"],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ssn": {}}}}}],
        "stream": True,
        "prompt": [[1, 2], [3]],
        "seed": 17,
        "n": None,
    }
    assert shape(document) == {
        "model": "text(4)",
        "messages": [
            {"role": "system", "content": "text(9)"},
            {"role": "user", "content": [{"type": "text", "text": "text(11)"}, {"type": "image_url", "image_url": {"url": "text(6)"}}]},
        ],
        "temperature": 0.2,
        "max_tokens": "number",
        "reasoning_effort": "text(3)",
        "stop": "list(2)",
        "tools": [{"type": "function", "function": {"name": "text(1)", "parameters": {"type": "object", "other": 1}}}],
        "stream": True,
        "prompt": ["list(2)", "list(1)"],
        "seed": "number",
        "n": None,
        "other": 1,
    }


def test_what_follows_in_a_list_is_counted() -> None:
    shown = shape({"messages": [{"role": "user", "content": "x"}] * 11})["messages"]
    assert (len(shown), shown[-1]) == (9, "and 3 more")


def test_no_name_is_shown_that_could_be_a_value() -> None:
    assert "other" not in SETTINGS | PARTS | KEYWORDS


def test_the_access_log_has_shapes_only_where_the_operator_says_so_and_from_a_reload_on(tmp_path: Path) -> None:
    config = configuration(launched())
    with gateway(tmp_path, config) as one:
        assert one.request(messages=[{"role": "user", "content": "hello"}], secret=1).status_code == 200
        write(one.folder / "gateway.yaml", config | {"log": {"sample": 1.0}})
        assert one.command("reload").returncode == 0
        assert one.request(messages=[{"role": "user", "content": "hello"}], secret=1).status_code == 200
        assert one.request(temperature="warm").status_code == 400
        plain, shown, refused = (orjson.loads(line) for line in wait_for(lambda: _lines(one.log, 3)))
        assert "request" not in plain
        assert shown["request"]["messages"] == [{"role": "user", "content": "text(5)"}]
        assert shown["request"]["other"] == 1 and "secret" not in one.log
        assert refused["request"]["temperature"] == "text(4)"


def _lines(log: str, count: int) -> list[str] | None:
    lines = log.rpartition("\n")[0].splitlines()  # without a line that is still being written
    return lines if len(lines) >= count else None
