"""The table of allowed body fields, and the operator's settings for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import strict_json
from gateway.api.errors import Refusal
from gateway.api.routes import ROUTES, Body
from gateway.auth.body_policy import BATCHES, FORBIDDEN, MAX_BATCH, MAXIMA, OLD_NAMES, REFUSED, SIZES, STRIPPED, TOKEN_LIMITS, BodyPolicy
from gateway.proxy import payload
from gateway.proxy.json_body import JsonBody
from gateway.snapshot.snapshot import BodyRules
from gateway.system.steps import finished
from tests.support.rows import each_row

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (ROUTES[f"/v1/{name}"] for name in ("chat/completions", "completions", "responses", "messages"))
MESSAGE = {"messages": [{"role": "user", "content": "Hi"}]}


def parse(body: bytes) -> dict[str, Any]:
    return finished(strict_json.parse(body))


def prepare(*arguments: Any) -> JsonBody:
    return finished(payload.prepare(*arguments))


def applied(document: dict[str, Any], **rules: Any) -> dict[str, Any]:
    """Return the body after the policy was applied."""
    finished(BodyPolicy(BodyRules(**rules), {}, {}).apply(document, len(orjson.dumps(document)), large=False))
    return document


def refused(document: dict[str, Any], **rules: Any) -> str | None:
    """The field that is blamed."""
    with pytest.raises(Refusal) as caught:
        applied(document, **rules)
    assert caught.value.code == "invalid_value"
    return caught.value.param


@each_row("name", sorted(FORBIDDEN))
def test_operators_may_allow_a_field(name: str) -> None:
    assert applied({name: 5}, allow=(name,)) == {name: 5}
    kwargs = {"chat_template_kwargs": {name: 5}}
    assert applied(dict(kwargs), allow=(name,)) == kwargs
    assert refused(dict(kwargs)) == f"chat_template_kwargs.{name}"


def test_operators_may_refuse_a_field() -> None:
    assert refused({"logit_bias": {"1": 1}}, refuse=("logit_bias",)) == "logit_bias"
    assert refused({"chat_template_kwargs": {"x": 1}}, refuse=("x",)) == "chat_template_kwargs.x"
    assert refused({"priority": 1}, refuse=("priority",)) == "priority", "it is stripped otherwise"
    assert refused({"n": 1}, refuse=("n",)) == "n"
    assert refused({"chat_template_kwargs": {"x": 1}}, refuse=("chat_template_kwargs",)) == "chat_template_kwargs"
    for name, older in OLD_NAMES.items():
        for each in (name, *older):
            assert refused({each: "x"}, refuse=(name,)) == each
    assert applied({"logit_bias": None}, refuse=("logit_bias",)) == {}


def test_what_a_template_is_given() -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert applied(dict(kwargs)) == kwargs
    assert refused({"chat_template_kwargs": {"tokenize": False}}) == "chat_template_kwargs.tokenize"
    assert refused({"chat_template_kwargs": {"chat_template": None}}) == "chat_template_kwargs.chat_template"


@pytest.mark.parametrize("name", sorted(MAXIMA))
def test_the_largest_numbers(name: str) -> None:
    for fine in (0, 1, MAXIMA[name], True, float(MAXIMA[name]), None):
        assert applied({name: fine}) == {name: fine}
    wrongs: list[Any] = [MAXIMA[name] + 1, MAXIMA[name] + 0.5, 1e300, -1, "2", [1], {}]
    for wrong in wrongs:
        assert refused({name: wrong}) == name
    assert applied({name: 10**6}, allow=(name,)) == {name: 10**6}


def test_operators_set_the_largest_numbers() -> None:
    assert refused({"n": 3}, max_n=2) == "n" and refused({"best_of": 3}, max_n=2) == "best_of"
    assert applied({"n": 500}, max_n=1000) == {"n": 500}
    for name in TOKEN_LIMITS:
        assert refused({name: 101}, max_tokens=100) == name
        assert applied({name: 100}, max_tokens=100) == {name: 100}
        assert applied({name: 10**9}) == {name: 10**9}


def bounded(document: dict[str, Any], route: Any, most: int = 100, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    prepared = prepare(document, BodyPolicy(BodyRules(max_tokens=most), defaults or {}, {}), route, 100)
    return {name: value for name, value in prepared.document.items() if name in TOKEN_LIMITS}


def test_a_request_without_a_bound_gets_the_operators() -> None:
    assert bounded({**MESSAGE}, CHAT) == {"max_tokens": 100}
    assert bounded({**MESSAGE, "max_tokens": None}, CHAT) == {"max_tokens": 100}
    assert bounded({**MESSAGE, "max_completion_tokens": 7}, CHAT) == {"max_completion_tokens": 7}
    assert bounded({**MESSAGE}, CHAT, defaults={"max_tokens": 50}) == {"max_tokens": 50}
    assert bounded({"prompt": "x"}, CHAT) == {"max_tokens": 16}, "vLLM's own default for a prompt"
    assert bounded({"prompt": "x"}, COMPLETIONS) == {"max_tokens": 16}
    assert bounded({"prompt": "x"}, COMPLETIONS, 10) == {"max_tokens": 10}
    assert bounded({"input": "x"}, RESPONSES) == {"max_output_tokens": 100}
    assert bounded({"input": "x"}, ROUTES["/v1/embeddings"]) == {}


ITS_OWN = {CHAT: ("max_completion_tokens", "max_tokens"), COMPLETIONS: ("max_tokens",), RESPONSES: ("max_output_tokens",)}
BODIES: dict[Any, dict[str, Any]] = {CHAT: MESSAGE, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}


@pytest.mark.parametrize("route", ITS_OWN, ids=lambda route: route.path)
@pytest.mark.parametrize("name", TOKEN_LIMITS)
def test_another_routes_name_for_the_bound_is_not_used(route: Any, name: str) -> None:
    sent = bounded({**BODIES[route], name: 7}, route, 10)
    own = {each: value for each, value in sent.items() if each in ITS_OWN[route]}
    assert own == ({name: 7} if name in ITS_OWN[route] else {ITS_OWN[route][-1]: 10})


def test_the_bound_of_a_prompt_on_the_chat_route() -> None:
    assert bounded({"prompt": "x", "max_completion_tokens": 7}, CHAT) == {"max_tokens": 7}
    assert bounded({"prompt": "x", "max_output_tokens": 7}, CHAT)["max_tokens"] == 16


@each_row("name", sorted(SIZES))
def test_large_fields(name: str) -> None:
    assert refused({name: {"x": "x" * SIZES[name]}}) == name
    for fine in ({"x": "x" * (SIZES[name] - 100)}, None):
        assert applied({name: fine, "prompt": "x" * 2**21}) == {name: fine, "prompt": "x" * 2**21}
    assert applied({name: {"x": "x" * SIZES[name]}}, allow=(name,))


def test_large_batches() -> None:
    for name in ("prompt", "input", "documents"):
        assert refused({name: ["x"] * (MAX_BATCH + 1)}) == name
        assert refused({name: [[1]] * (MAX_BATCH + 1)}) == name
        assert applied({name: ["x"] * MAX_BATCH}) and applied({name: ["x"] * (MAX_BATCH + 1)}, allow=(name,))
    assert applied({"prompt": [1] * 100_000}), "one prompt, as tokens"


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_whatever_a_batch_is_made_of(name: str) -> None:
    part = {"type": "text", "text": "x"}
    batches: list[Any] = [
        [{}, *["x"] * MAX_BATCH],
        [part] * (MAX_BATCH + 1),
        {"content": [part] * (MAX_BATCH + 1)},
        [1.5, *[[1]] * MAX_BATCH],
    ]
    for batch in batches:
        assert refused({name: batch}) == name
        assert applied({name: batch}, allow=(name,))
    assert applied({name: {"content": [part] * MAX_BATCH}, "messages": [part] * (MAX_BATCH + 1), "input": [part] * (MAX_BATCH + 1)})


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_responses_to_a_batch(name: str) -> None:
    for prompts in (["x"] * 17, [[1]] * 17):
        assert refused({name: 128, "prompt": prompts}) == name
        assert applied({name: 128, "prompt": prompts[:16]}) and applied({name: 128, "prompt": prompts}, allow=(name,))
    assert applied({name: 128, "prompt": [1] * 1000}) and applied({name: 128, "prompt": "x"})


def test_an_echo_brings_no_probabilities_of_the_prompt() -> None:
    for name, value in (("logprobs", True), ("logprobs", 0), ("logprobs", 5), ("top_logprobs", 0), ("top_logprobs", 20)):
        assert refused(MESSAGE | {"echo": True, name: value}) == "echo"
        assert applied(MESSAGE | {"echo": True, name: value}, allow=("prompt_logprobs",)) == MESSAGE | {"echo": True, name: value}
        assert applied(MESSAGE | {"echo": False, name: value}) == MESSAGE | {"echo": False, name: value}
        assert applied({"prompt": "x", "echo": True, name: value}) == {"prompt": "x", "echo": True, name: value}, "as OpenAI has it"
    requested = MESSAGE | {"echo": True, "logprobs": False}
    assert applied(dict(requested)) == requested | {"top_logprobs": None}, "vLLM's default is 0"
    assert refused({"echo": True}, refuse=("echo",)) == "echo"


@pytest.mark.parametrize("images", [["http://10.0.0.1/"], ["data:image/png;base64,AA==", "https://a.example.com/b"], ["file:///etc"], [5]])
def test_the_images_of_coheres_api_are_data_unless_hosts_are_listed(images: list[Any]) -> None:
    route = ROUTES["/v2/embed"]
    with pytest.raises(Refusal) as caught:
        prepare({"images": images}, BodyPolicy(BodyRules(), {}, {}), route, 100)
    assert (caught.value.code, caught.value.param) == ("invalid_value", f"images.{len(images) - 1}")
    listed = BodyPolicy(BodyRules(media_hosts=("*.example.com",)), {}, {})
    allowed = ["data:image/png;base64,AA==", "https://a.example.com/b"]
    assert prepare({"images": allowed}, listed, route, 100).document["images"] == allowed


@pytest.mark.parametrize("name", ["texts", "images", "inputs"])
def test_the_lists_of_coheres_api_have_a_bound(name: str) -> None:
    value: list[Any] = [{"content": []}] if name == "inputs" else ["data:,"]
    with pytest.raises(Refusal) as caught:
        prepare({name: value * (MAX_BATCH + 1)}, BodyPolicy(BodyRules(), {}, {}), ROUTES["/v2/embed"], 100)
    assert caught.value.param == name


def test_a_batch_of_conversations_has_a_bound_and_the_rules_of_each() -> None:
    route, conversation = ROUTES["/v1/chat/completions/batch"], [{"role": "user", "content": "x"}]
    with pytest.raises(Refusal) as caught:
        prepare({"messages": [conversation] * (MAX_BATCH + 1)}, BodyPolicy(BodyRules(), {}, {}), route, 100)
    assert caught.value.param == "messages"
    pictured = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}]}]
    with pytest.raises(Refusal) as caught:
        prepare({"messages": [conversation, pictured]}, BodyPolicy(BodyRules(), {}, {}), route, 100)
    assert caught.value.param == "messages.1.0.content.0.image_url" and caught.value.param in caught.value.message
    prepared = prepare({"messages": [conversation]}, BodyPolicy(BodyRules(max_tokens=50), {}, {}), route, 100)
    assert (prepared.path, prepared.document["max_tokens"]) == (route.path, 50)


def test_media_are_data_unless_hosts_are_listed() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.example.com/x"}}]}]}
    assert refused(dict(body)) == "messages.0.content.0.image_url"
    assert refused({"text_1": body["messages"][0]}) == "text_1.content.0.image_url"
    assert applied(dict(body), media_hosts=("*.example.com",)) == body
    schema = {"properties": {"image_url": {"type": "string", "examples": [{"image_url": "http://a.example.com/x"}]}}}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "response_format": schema}
    assert applied(dict(tools)) == tools, "a schema is no message"


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ((), "This model takes no media from URLs. Send the media as a 'data:' URL, or ask the operator"),
        (("images.example.org", "*.cdn.example"), "of these hosts: *.cdn.example, images.example.org. Ask the operator to allow others."),
        (tuple(f"h{number}.example" for number in range(12)), "h7.example, …. Ask the operator"),
    ],
)
def test_a_refused_url_says_which_hosts_are_allowed(hosts: tuple[str, ...], text: str) -> None:
    url = "http://a.example.com/x"
    with pytest.raises(Refusal) as raised:
        applied({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}, media_hosts=hosts)
    assert raised.value.message.startswith("The URL in 'messages.0.content.0.image_url' is not allowed. ") and text in raised.value.message
    assert url not in raised.value.message


# Settings of a key

OWN = {"priority": -5, "cache_salt": "5a17"}


def sent(route: Any, document: dict[str, Any]) -> JsonBody:
    return prepare(document, BodyPolicy(BodyRules(allow=("cache_salt", "priority")), {"priority": 1}, {"cache_salt": "x"}), route, 100, OWN)


@each_row("route", [route for route in ROUTES.values() if route.body is Body.JSON], ids=lambda route: route.path)
def test_a_keys_fields_win_over_everybodys(route: Any) -> None:
    prepared = sent(route, {"prompt": "x", "priority": 9, "cache_salt": "mine"})
    if "cache_salt" in route.takes:
        assert prepared.document["cache_salt"] == "5a17"
    if "priority" in route.takes:
        assert prepared.document["priority"] == -5
    assert prepared.headers == (b"x-vllm-priority: -5\r\n" if route.path == "/v1/messages" else b"") or route.path.endswith("count_tokens")


def test_which_routes_take_them() -> None:
    taken = {path: sorted(route.takes) for path, route in ROUTES.items()}
    assert {path for path, names in taken.items() if not names} == {
        "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations",
    }  # fmt: skip
    assert taken["/v1/messages"] == ["cache_salt"] and taken["/v1/embeddings"] == ["cache_salt", "priority"]


# Numbers that JSON can say and 64 bits can't


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, -(2**63), 10**18, 0])
def test_integers_of_64_bits(number: int) -> None:
    assert parse(b'{"seed": %d}' % number) == {"seed": number}


@each_row("digits", [str(2**64), str(-(2**63) - 1), "1" + "0" * 30, "-1" + "0" * 307, "1" + "0" * 400, "9" * 5000], ids=len)
@each_row("before", ["", '"z": "%s", ' % ("x" * 20_000)], ids=["short", "long"])
def test_larger_integers_are_refused(digits: str, before: str) -> None:
    for body in ('{"seed": %s}', '{"a": [{"b": "c", "d": %s}]}', '{"a": "\\"", "seed": %s}', '{"a": [[1, 2.5, null, [%s]]]}'):
        with pytest.raises(Refusal) as caught:
            parse(("{" + before + (body % digits)[1:]).encode())
        named = "seed" if "seed" in body else "a"
        assert (caught.value.code, caught.value.param) in (("invalid_value", named), ("invalid_json", None))
        assert len(digits) > 300 or caught.value.param == named, "the number is not infinite"


_NUMBERS = st.integers(2**62, 2**66) | st.integers(-(2**65), -(2**62)) | st.floats(allow_nan=False, allow_infinity=False) | st.integers()


@given(
    st.recursive(_NUMBERS | st.text(max_size=3), lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=2), inner)),
    st.booleans(),
)
def test_a_rejected_body_has_an_integer_of_more_than_64_bits(value: Any, is_long: bool) -> None:
    body = json.dumps({"a": value, "z": "x" * (20_000 if is_long else 0)}).encode()
    fits = all(-(2**63) <= number < 2**64 for number in _integers(value))
    try:
        assert parse(body)["a"] == value and fits
    except Refusal:
        assert not fits


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for each in value if isinstance(value, list) else value.values():
            yield from _integers(each)


@pytest.mark.parametrize(
    "text", [b'"123456789012345678901234567890"', b"1.234567890123456789012345", b"1e30", b"0.00000000000000000000001"]
)
def test_long_rows_of_digits_that_are_no_integers(text: bytes) -> None:
    assert parse(b'{"a": %b}' % text) == {"a": orjson.loads(text)}


@pytest.mark.parametrize("count", [1000, 200_000])
def test_a_long_integer_costs_no_python_for_each_number(count: int) -> None:
    body = b'{"a":[1234567890123456789%b]}' % (b",1" * count)
    steps = 0

    def count_it(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count_it)
    try:
        assert len(parse(body)["a"]) == count + 1
    finally:
        sys.setprofile(None)
    assert steps < 200


def test_the_table_has_each_field_once() -> None:
    assert not STRIPPED & REFUSED and not FORBIDDEN & MAXIMA.keys()
