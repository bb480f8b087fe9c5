"""Whatever a client sends: what was checked is what is sent, and the rest of it as it was."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic import TypeAdapter, ValidationError

from gateway.api import strict_json
from gateway.api.errors import Refusal
from gateway.api.routes import ROUTES, Body, Route
from gateway.auth.body_policy import FORBIDDEN, NUMBERS, REFUSED, BodyPolicy
from gateway.auth.catalog import Catalog
from gateway.proxy.json_body import JsonBody
from gateway.proxy.payload import merge
from gateway.proxy.payload import prepare as prepare_in_steps
from gateway.snapshot.snapshot import Key, Model
from gateway.system.steps import finished
from tests.support.examples import examples
from tests.support.rows import each_row

JSON_ROUTES = [route for route in ROUTES.values() if route.body is Body.JSON]
CHAT, COMPLETIONS = ROUTES["/v1/chat/completions"], ROUTES["/v1/completions"]
MODEL = Model("tiny", ())
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def parse(body: bytes) -> dict[str, Any]:
    return finished(strict_json.parse(body))


def prepare(document: dict[str, Any], model: Model, route: Route) -> JsonBody:
    return finished(prepare_in_steps(document, BodyPolicy.for_model(model), route, len(orjson.dumps(document))))


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8
)
NAMES = st.sampled_from(
    [*sorted(FORBIDDEN), "model", "temperature", "messages", "stream", "stream_options", "chat_template_kwargs", "user", *GUIDED]
)
FREE = st.text(max_size=6).filter(lambda name: name not in (*NUMBERS, "stream"))
OBJECTS = st.dictionaries(NAMES, VALUES | st.fixed_dictionaries({}, optional={"chat_template": VALUES}), max_size=6)
ANY = st.builds(lambda body, extra, there: {**body, "extra_body": extra} if there else body, OBJECTS, OBJECTS, st.booleans())


@settings(deadline=None)
@given(document=ANY, route=st.sampled_from(JSON_ROUTES))
def test_what_is_forbidden_is_absent_or_refused(document: dict[str, Any], route: Any) -> None:
    try:
        sent = orjson.loads(prepare(merge(parse(orjson.dumps(document))), MODEL, route).encode("inside"))
    except Refusal as caught:
        status = caught.spec.status
    else:
        status = 200
    if status != 200:
        assert status == 400
        return
    assert not FORBIDDEN & sent.keys()
    assert "extra_body" not in sent and sent["model"] == "inside"
    kwargs = sent.get("chat_template_kwargs")
    assert not (isinstance(kwargs, dict) and "chat_template" in kwargs)


_BOOLEANS = ("true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0", "perhaps", "")
_CASED = st.sampled_from(_BOOLEANS).flatmap(lambda text: st.sampled_from((text, text.upper(), text.title(), f" {text}", f"{text} ")))


@settings(deadline=None, max_examples=examples(300))
@given(SCALARS | _CASED | st.sampled_from((0, 1, 2, -1, 0.0, 1.0, 0.5)) | st.lists(st.booleans()))
def test_a_boolean_is_read_as_by_vllm_and_sent_as_it_was_read(value: Any) -> None:
    document = {"model": "tiny", "messages": [], "stream": value, "stream_options": {"include_usage": value}}
    try:
        expected = TypeAdapter(bool | None).validate_python(value)
    except ValidationError:
        with pytest.raises(Refusal, match="must be true or false") as caught:
            prepare(document, MODEL, CHAT)
        assert caught.value.param == "stream"
        return
    body = prepare(document, MODEL, CHAT)
    assert body.stream == bool(expected) and body.document["stream"] is expected
    assert body.hides_usage == (body.stream and not expected)


@pytest.mark.parametrize("null", [{"extra_body": None}, {}])
def test_extra_body_null_counts_as_absent(null: dict[str, Any]) -> None:
    assert merge(parse(orjson.dumps({"model": "tiny", **null}))) == {"model": "tiny"}


@settings(deadline=None)
@given(body=st.dictionaries(FREE, VALUES, max_size=5), extra=st.dictionaries(FREE, VALUES, max_size=5))
def test_every_other_member_keeps_its_value(body: dict[str, Any], extra: dict[str, Any]) -> None:
    route = ROUTES["/v1/embeddings"]
    sent = orjson.loads(prepare(merge(parse(orjson.dumps({**body, "extra_body": extra}))), MODEL, route).encode("inside"))
    expected = {name: value for name, value in {**body, **extra}.items() if name not in FORBIDDEN and name != "extra_body"}
    assert sent == {**expected, "model": "inside"}
    for name, value in expected.items():
        if name != "model":
            assert orjson.dumps(sent[name]) == orjson.dumps(value), "1 stays 1, and 1.0 stays 1.0"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["tiny", "hush", "secret", "", "TINY", 5, None]), min_size=1, max_size=4),
       st.sampled_from([None, "tiny", "secret", {}]), st.booleans())  # fmt: skip
def test_what_is_authorized_is_what_is_dispatched(models: list[Any], extra: Any, escaped: bool) -> None:
    name = b'"\\u006dodel":' if escaped else b'"model":'
    fields = b",".join((name if n % 2 else b'"model":') + orjson.dumps(value) for n, value in enumerate(models))
    body = b"{" + fields + (b',"extra_body":{"model":%b}' % orjson.dumps(extra) if extra is not None else b"") + b"}"
    catalog = Catalog([Model("tiny", (), aliases=("small",)), Model("secret", (), aliases=("hush",))], {})
    try:
        document = merge(parse(body))
        entry = catalog.resolve(document.get("model"), Key("team", models=("tiny",)))
    except Refusal:
        return
    assert entry.model.id == "tiny"
    assert orjson.loads(prepare(document, entry.model, COMPLETIONS).encode(entry.model.id))["model"] == "tiny"
    assert (extra if extra is not None else models[-1]) in ("tiny", "", None), "without a name, it is the key's only model"


@each_row("name", sorted(FORBIDDEN))
@each_row("value", [0, 1, "", "x", {}, []])
def test_a_forbidden_field_with_any_value(name: str, value: object) -> None:
    if name in REFUSED:
        with pytest.raises(Refusal) as caught:
            prepare({name: value}, MODEL, COMPLETIONS)
        assert (caught.value.code, caught.value.param) == ("invalid_value", name)
    else:
        assert prepare({name: value}, MODEL, COMPLETIONS).document == {}
    for harmless in (None, False):
        assert prepare({name: harmless}, MODEL, COMPLETIONS).document == {}


@pytest.mark.parametrize("given", [{}, {"store": True}, {"store": False}, {"store": None}, {"extra_body": {"store": True}}])
def test_responses_are_never_stored(given: dict[str, Any]) -> None:
    """``store: true`` is OpenAI's default value. A server with its store on would keep responses that no client can get."""
    document = prepare(merge({"input": "x", **given}), MODEL, ROUTES["/v1/responses"]).document
    assert document == {"input": "x", "store": False}


@pytest.mark.parametrize("field", ["defaults", "overrides"])
def test_an_operator_may_have_responses_stored(field: str) -> None:
    model = Model("tiny", (), **{field: {"store": True}})  # type: ignore[arg-type]
    assert prepare({"input": "x"}, model, ROUTES["/v1/responses"]).document["store"] is True


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "background"])
def test_what_needs_a_stored_response_is_refused(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        prepare({"input": "x", "store": True, name: True}, MODEL, ROUTES["/v1/responses"])
    assert (caught.value.code, caught.value.param) == ("invalid_value", name)


def test_the_operators_fields() -> None:
    model = Model("tiny", (), defaults={"temperature": 0.7, "priority": 5}, overrides={"seed": 1, "chat_template": "x"})
    document = prepare({"temperature": 0, "seed": 2, "priority": 9, "prompt": "p"}, model, COMPLETIONS).document
    assert document == {"temperature": 0, "seed": 1, "priority": 5, "chat_template": "x", "prompt": "p"}


@pytest.mark.parametrize("old", GUIDED)
def test_guided_words_become_todays(old: str) -> None:
    prepared = prepare({"prompt": "p", old: "v", "guided_whitespace_pattern": "w", "guided_decoding_backend": "b"}, MODEL, COMPLETIONS)
    assert prepared.document == {"prompt": "p", "structured_outputs": {GUIDED[old]: "v", "whitespace_pattern": "w"}}
    with pytest.raises(Refusal):
        prepare({"prompt": "p", old: "v", "structured_outputs": {"json": {}}}, MODEL, COMPLETIONS)
    assert prepare({"prompt": "p", old: None}, MODEL, COMPLETIONS).document == {"prompt": "p"}
    assert prepare({old: "v"}, MODEL, ROUTES["/v1/embeddings"]).document == {old: "v"}, "it has no meaning there"


@pytest.mark.parametrize(
    ("options", "sent", "hides"),
    [
        (None, {"include_usage": True, "continuous_usage_stats": False}, True),
        ({}, {"include_usage": True, "continuous_usage_stats": False}, True),
        ({"include_usage": False}, {"include_usage": True, "continuous_usage_stats": False}, True),
        ({"include_usage": None, "x": 1}, {"include_usage": True, "continuous_usage_stats": False, "x": 1}, True),
        ({"continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": False}, True),
        ({"include_usage": True}, {"include_usage": True}, False),
        ({"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True, "continuous_usage_stats": True}, False),
    ],
)
def test_usage_is_requested_in_streams(options: object, sent: object, hides: bool) -> None:
    prepared = prepare({"prompt": "p", "stream": True, "stream_options": options}, MODEL, COMPLETIONS)
    assert (prepared.document["stream_options"], prepared.hides_usage, prepared.stream) == (sent, hides, True)
    plain = prepare({"prompt": "p", "stream": False}, MODEL, COMPLETIONS)
    assert "stream_options" not in plain.document and not plain.hides_usage


@settings(deadline=None)
@given(document=ANY, route=st.sampled_from(JSON_ROUTES))
def test_in_steps_it_is_the_same(document: dict[str, Any], route: Route) -> None:
    body = orjson.dumps(document)

    def outcome(at_once: bool) -> object:
        try:
            return finished(prepare_in_steps(merge(parse(body)), BodyPolicy.for_model(MODEL), route, len(body), large=not at_once))
        except Refusal as refusal:
            return refusal.code, refusal.message

    at_once, in_steps = outcome(True), outcome(False)
    if not isinstance(in_steps, JsonBody) or not isinstance(at_once, JsonBody):
        assert at_once == in_steps
    else:
        assert replace(at_once, translation=None) == replace(in_steps, translation=None)
        assert type(at_once.translation) is type(in_steps.translation)
        serialized = in_steps.serialized("inside")
        assert serialized.document == {}, "only the bytes are stored"
        assert serialized.sent_document() == orjson.loads(in_steps.encode("inside"))
        for name in ("inside", 'an"other', "x"):
            assert orjson.loads(serialized.encode(name)) == orjson.loads(in_steps.encode(name))
