"""Which model a name means, and for whom."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.api.routes import ROUTES
from gateway.auth.catalog import Catalog
from gateway.snapshot.snapshot import Key, Model
from tests.support.running import key, model, serving
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, request, request_once

CATALOG = Catalog(
    [
        Model("Qwen/big", (), aliases=("qwen", "default"), mounts=("/i-1/1", "/i-1/2/")),
        Model("meta/small", (), aliases=("llama",)),
        Model("meta/SMALL", ()),
    ],
    {},
)


async def whole(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


def ids(globs: tuple[str, ...] | None) -> list[str]:
    return [entry.model.id for entry in CATALOG.visible(Key("k", models=globs))]


@pytest.mark.parametrize(
    ("globs", "visible"),
    [
        (None, ["Qwen/big", "meta/small", "meta/SMALL"]),
        (("*",), ["Qwen/big", "meta/small", "meta/SMALL"]),
        ((), []),
        (("Qwen/*",), ["Qwen/big"]),
        (("qwen",), ["Qwen/big"]),
        (("meta/small",), ["meta/small"]),
        (("meta/?mall", "nothing"), ["meta/small"]),
        (("QWEN/*",), []),
        (("Qwen",), []),
    ],
)
def test_what_a_key_may_use(globs: tuple[str, ...] | None, visible: list[str]) -> None:
    assert ids(globs) == visible
    for name, found in (("Qwen/big", "Qwen/big"), ("default", "Qwen/big"), ("llama", "meta/small"), ("meta/SMALL", "meta/SMALL")):
        if found in visible:
            assert CATALOG.resolve(name, Key("k", models=globs)).model.id == found
        else:
            with pytest.raises(Refusal):
                CATALOG.resolve(name, Key("k", models=globs))


@settings(deadline=None)
@given(st.text(max_size=10) | st.sampled_from(["qwen ", " qwen", "QWEN", "Qwen/big\x00", "qwen/big", "Qwen/*", "meta/Small"]))
def test_names_are_exact(name: str) -> None:
    if name in ("Qwen/big", "qwen", "default", "meta/small", "llama", "meta/SMALL", ""):
        return  # an empty text names no model
    with pytest.raises(Refusal) as caught:
        CATALOG.resolve(name, Key("k"))
    assert caught.value.code == "model_not_found"


def test_a_key_and_its_token_both_limit_the_models() -> None:
    """A token may name fewer models than its entry."""
    for models, within, found in (
        (None, ("meta/*",), ["meta/small", "meta/SMALL"]),
        (("Qwen/*",), ("meta/*",), []),
        (("llama", "qwen"), ("meta/*",), ["meta/small"]),
        (("*",), (), []),
    ):
        limited = Key("k", models=models, within=within)
        assert [entry.model.id for entry in CATALOG.visible(limited)] == found
        for entry in CATALOG.entries:
            if entry.model.id in found:
                assert CATALOG.resolve(entry.model.id, limited) is entry
            else:
                with pytest.raises(Refusal):
                    CATALOG.resolve(entry.model.id, limited)


def test_the_fallbacks_that_a_key_may_use() -> None:
    """A key that may use a split may use its models through it."""
    catalog = Catalog(
        [Model("a", (), fallbacks=("b", "c")), Model("b", ()), Model("c", ()), Model("s", (), split=(("a", 1), ("b", 1)))], {}
    )
    named = {entry.model.id: entry for entry in catalog.entries}
    for models, name, found in ((None, "a", ["b", "c"]), (("a", "c"), "a", ["c"]), (("a",), "a", []), (("s",), "s", ["b"])):
        assert [each.model.id for each in catalog.fallbacks(named["a"], Key("k", models=models), named[name])] == found


def test_hidden_and_unknown_models_get_the_same_error() -> None:
    errors = []
    for name, globs in (("meta/small", ("Qwen/*",)), ("meta/smell", None)):
        with pytest.raises(Refusal) as caught:
            CATALOG.resolve(name, Key("k", models=globs))
        errors.append(caught.value.message.replace(name, "X"))
    assert errors[0] == errors[1]


def test_an_instance_serves_its_model_alone() -> None:
    mounted = CATALOG.targets[b"/i-1/2/v1/chat/completions"].mounted
    assert mounted is not None and mounted.model.id == "Qwen/big"
    assert CATALOG.mounted("/i-1/1/v1/models", "/v1/models") is mounted
    assert CATALOG.mounted("/i-1/3/v1/models", "/v1/models") is None
    assert CATALOG.mounted("/i-1/1", "/v1/models") is None
    assert CATALOG.resolve(None, Key("k"), mounted) is mounted
    assert CATALOG.resolve("qwen", Key("k"), mounted) is mounted
    with pytest.raises(Refusal):
        CATALOG.resolve("meta/small", Key("k"), mounted)
    assert [entry.model.id for entry in CATALOG.visible(Key("k"), mounted)] == ["Qwen/big"]
    assert len(CATALOG.targets) == 2 * 3 * len(ROUTES), "each with and without a slash at its end"


@pytest.mark.parametrize("value", [["tiny"], 5, False, {}])
def test_a_model_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(Refusal) as caught:
        CATALOG.resolve(value, Key("k"))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "model")


LORAS = [Model("base", ()), Model("adapter", (), parent="base", served="adapter")]
TWO = [Model("one", (), aliases=("first",)), Model("two", ())]


@pytest.mark.parametrize(("name", "found"), [(None, "two"), ("", "two"), ("first", "one")])
def test_null_and_an_empty_text_name_no_model(name: str | None, found: str) -> None:
    assert Catalog(TWO, {}, "two").resolve(name, Key("k")).model.id == found


@pytest.mark.parametrize(
    ("models", "default", "globs", "expected"),
    [
        ([Model("one", ())], None, None, "one"),
        (TWO, None, ("two",), "two"),
        (TWO, "two", None, "two"),
        (TWO, "first", None, "one"),
        (LORAS, None, None, "base"),
        (LORAS, None, ("adapter",), "adapter"),
        (LORAS, "adapter", None, "adapter"),
    ],
)
def test_the_model_of_a_request_that_names_none(
    models: list[Model], default: str | None, globs: tuple[str, ...] | None, expected: str
) -> None:
    assert Catalog(models, {}, default).resolve(None, Key("k", models=globs)).model.id == expected


@pytest.mark.parametrize(
    ("models", "default", "globs", "code"),
    [
        (TWO, None, None, "missing_required_parameter"),
        (TWO, None, (), "missing_required_parameter"),
        (TWO, "one", ("two",), "model_not_found"),
        ([*LORAS, *TWO], None, ("adapter", "two"), "missing_required_parameter"),
    ],
)
def test_a_request_that_names_no_model_is_refused(
    models: list[Model], default: str | None, globs: tuple[str, ...] | None, code: str
) -> None:
    with pytest.raises(Refusal) as caught:
        Catalog(models, {}, default).resolve(None, Key("k", models=globs))
    assert (caught.value.code, caught.value.param) == (code, "model")
    assert not any(f"'{each.id}'" in caught.value.message or f"`{each.id}`" in caught.value.message for each in models)


@pytest.mark.parametrize("body", [{"messages": []}, {"model": None, "messages": []}, {"model": "", "messages": []}])
async def test_the_default_model_serves_a_body_without_one(body: dict[str, object]) -> None:
    async with scripted(whole) as server:
        models = [model(server.port, served="inside"), model(server.port, identity="other")]
        async with serving(models, [key()], default_model="tiny") as served:
            assert (await request_once(served.port, request(body))).body == COMPLETION
            assert server.requests[0].json["model"] == "inside"
            assert served.context.records[0].model == "tiny"


async def test_the_only_model_of_a_key_serves_a_body_without_one() -> None:
    async with scripted(whole) as server:
        models = [model(server.port), model(server.port, identity="other", rewrite=True, served="inside")]
        async with serving(models, [key(models=("other",))]) as served:
            reply = await request_once(served.port, request({"messages": []}))
            assert orjson.loads(reply.body)["model"] == "other", "its ID is in the response"


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/i-1/v1/chat/completions/", "/v1/chat/completions/?x=1"])
async def test_a_slash_at_the_end_of_a_path_changes_nothing(path: str) -> None:
    async with scripted(whole) as server, serving([model(server.port, mounts=("/i-1",))]) as served:
        assert (await request_once(served.port, request(path=path))).body == COMPLETION
        assert server.requests[0].head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert served.context.records[0].endpoint == "/v1/chat/completions"
