"""Requests with one mistake each, through the gateway to a real vLLM: the error message names the field or states the cause.

``.venv/bin/pytest -rA tests/vllm/test_wrong_fields.py`` prints both tables. With RECORD=1 in the environment it also writes what the
servers said into tests/gateway/api/vllm/errors.json, by which the mapping is tested without a vLLM.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.api.errors import ERRORS
from gateway.api.vllm.errors import from_server
from tests.vllm.dialogues import Json
from tests.vllm.gateway import MODEL, PYTHON, Real, real_gateway
from tests.vllm.server import ENVIRONMENT, NOT_INSTALLED, POOLING, Flag, installed
from tests.vllm.wrong_fields import CLASSIFY, COUNT, GENERATING, MESSAGES, WRONG_FIELDS, WRONG_REQUESTS, WrongField, WrongRequest

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

RECORDED = Path(__file__).resolve().parents[1] / "gateway" / "api" / "vllm" / "errors.json"
LEAST = 10
"""The minimum number of mistakes for each route."""
CLASSIFYING: dict[str, Flag] = {**POOLING, "convert": "classify"}
OF_POOLING = [row for row in WRONG_FIELDS if row.route not in (*GENERATING, CLASSIFY)]
OF_CLASSIFYING = [row for row in WRONG_FIELDS if row.route == CLASSIFY]
INTERNALS = re.compile(r"Param\b|Message\b|Request\b|ValidatorIterator|input_value|pydantic|body\.|\[type=|'input'|--[a-z]{2}|VLLM_")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table: the mistake, and the message that the client got."""

    name: str
    path: str
    reported: str
    good: bool


def _named(path: str, message: str) -> bool:
    """Return whether a message names exactly this path, not a longer or a shorter path."""
    return re.search(rf"(?<![\w.]){re.escape(path)}(?![\w]|\.\w)", message) is not None


def _result(real: Real, row: WrongField) -> Line:
    response = real.post(row.route, row.body)
    error = response.json()["error"]
    shape = {"type", "message"} if row.route in (MESSAGES, COUNT) else {"message", "type", "param", "code"}
    message = error["message"]
    good = response.status_code == 400 and error.keys() == shape and _named(row.path, message) and not INTERNALS.search(message)
    good &= response.headers["x-should-retry"] == "false" and error.get("code", "invalid_value") in ERRORS
    good &= error.get("param", row.path) is not None and row.message in (None, message)
    return Line(row.route, row.path, f"{response.status_code} {error.get('code', error['type'])}: {message}", good)


def _printed(lines: Iterable[Line]) -> list[Line]:
    """Print all lines. Return those that are not good."""
    wrong = []
    for line in lines:
        print(f"{'   ' if line.good else '!! '}{line.name:<28} {line.path:<44} {line.reported}")
        if not line.good:
            wrong.append(line)
    return wrong


def _checked(real: Real, rows: list[WrongField]) -> None:
    wrong = _printed(_result(real, row) for row in rows)
    print(f"{len(rows) - len(wrong)} of {len(rows)}")
    if os.environ.get("RECORD"):
        _record(real, rows)
    assert not wrong


def _record(real: Real, rows: list[WrongField]) -> None:
    """Write the server's response to each request that reached it, and the request."""
    known: dict[str, Json] = {_key(each): each for each in json.loads(RECORDED.read_text())} if RECORDED.exists() else {}
    for row in rows:
        response = real.post(row.route, row.body)
        if real.reached_the_server(response):
            seen = real.recorded(response)
            known[_key(asdict(row))] = {**_given(row), "sent": json.loads(seen.request), "error": json.loads(seen.output)}
    stored = [known[key] for key in (_key(asdict(row)) for row in WRONG_FIELDS) if key in known]
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in stored) + "\n]\n")


def _given(row: WrongField) -> Json:
    return {name: value for name, value in asdict(row).items() if value is not None}


def _key(row: Json) -> str:
    return json.dumps([row["route"], row["path"], row["body"]])


def test_every_route_has_enough_rows() -> None:
    counts = {route: sum(row.route == route for row in WRONG_FIELDS) for route in {row.route for row in WRONG_FIELDS}}
    assert len(WRONG_FIELDS) >= 200 and len(WRONG_REQUESTS) >= 30
    assert min(counts.values()) >= LEAST, counts


def test_the_message_names_the_field_of_a_generating_model(real: Real) -> None:
    _checked(real, [row for row in WRONG_FIELDS if row.route in GENERATING])


@pytest.mark.parametrize(("flags", "rows"), [(dict(POOLING), OF_POOLING), (CLASSIFYING, OF_CLASSIFYING)], ids=["embed", "classify"])
def test_the_message_names_the_field_of_a_pooling_model(tmp_path: Path, flags: dict[str, Flag], rows: list[WrongField]) -> None:
    with real_gateway(tmp_path, flags=flags) as real:
        real.wait_until_up()
        _checked(real, rows)


def test_the_message_states_the_cause(real: Real) -> None:
    lines = list(_caused(real))
    wrong = _printed(lines)
    print(f"{len(lines) - len(wrong)} of {len(lines)}")
    assert not wrong


def _caused(real: Real) -> Iterator[Line]:
    for row in WRONG_REQUESTS:
        status, headers, body = _sent(real.gateway.url, row)
        error = json.loads(body)["error"]
        good = (status, error["code"]) == (row.status, row.code) and row.texts in error["message"]
        good &= headers.get("x-should-retry") == "false"
        yield Line(row.name, row.texts, f"{status} {error['code']}: {error['message']}", good)


def _sent(url: str, row: WrongRequest) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60) as connection:
        connection.sendall(row.data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.headers, response.read()


FAILED_RESPONSE = """
from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
try:
    AnthropicContentBlock(type="tool_use", id="a", name="f", input=[1, 2])
except Exception as error:
    print(create_error_response(error).model_dump_json())
"""


def test_a_tool_call_that_is_no_object_is_the_servers_error() -> None:
    """vLLM's own classes reject arguments that a model generated as a list."""
    text = subprocess.run([PYTHON, "-c", FAILED_RESPONSE], capture_output=True, check=True, timeout=300, env={**os.environ, **ENVIRONMENT})
    body = text.stdout.splitlines()[-1]
    assert json.loads(body)["error"]["code"] == 400
    refusal = from_server(400, body, MODEL, "messages", None, {"messages": [], "tool_choice": {"type": "any"}})
    assert (refusal.code, refusal.spec.status) == ("server_error", 500)
    assert refusal.message.startswith("The model's output was not valid")
