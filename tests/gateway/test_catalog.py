"""Which model a name means, and for whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.catalog import Catalog, card, named_model
from gateway.errors import Refusal
from gateway.routes import ROUTES
from gateway.state import Key, Model

CATALOG = Catalog(
    [
        Model("Qwen/big", (), aliases=("qwen", "default"), mounts=("/i-1/1", "/i-1/2/")),
        Model("meta/small", (), aliases=("llama",)),
        Model("meta/SMALL", ()),
    ],
    {},
)


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
    for name, model in (("Qwen/big", "Qwen/big"), ("default", "Qwen/big"), ("llama", "meta/small"), ("meta/SMALL", "meta/SMALL")):
        if model in visible:
            assert CATALOG.resolve(name, Key("k", models=globs)).model.id == model
        else:
            with pytest.raises(Refusal):
                CATALOG.resolve(name, Key("k", models=globs))


@settings(deadline=None)
@given(st.text(max_size=10) | st.sampled_from(["qwen ", " qwen", "QWEN", "Qwen/big\x00", "qwen/big", "Qwen/*", "meta/Small"]))
def test_names_are_exact(name: str) -> None:
    if name in ("Qwen/big", "qwen", "default", "meta/small", "llama", "meta/SMALL"):
        return
    with pytest.raises(Refusal) as caught:
        CATALOG.resolve(name, Key("k"))
    assert caught.value.code == "model_not_found"


def test_hidden_and_unknown_are_told_alike() -> None:
    told = []
    for name, globs in (("meta/small", ("Qwen/*",)), ("meta/smell", None)):
        with pytest.raises(Refusal) as caught:
            CATALOG.resolve(name, Key("k", models=globs))
        told.append(caught.value.message.replace(name, "X"))
    assert told[0] == told[1]


def test_an_instance_serves_its_model_alone() -> None:
    mounted = CATALOG.targets[b"/i-1/2/v1/chat/completions"].mounted
    assert mounted is not None and mounted.model.id == "Qwen/big"
    assert CATALOG.mounted("/i-1/1/v1/models", "/v1/models") is mounted
    assert CATALOG.mounted("/i-1/3/v1/models", "/v1/models") is None
    assert CATALOG.mounted("/i-1/1", "/v1/models") is None
    assert named_model({}, mounted) == "Qwen/big"
    assert CATALOG.resolve("qwen", Key("k"), mounted) is mounted
    with pytest.raises(Refusal):
        CATALOG.resolve("meta/small", Key("k"), mounted)
    assert [entry.model.id for entry in CATALOG.visible(Key("k"), mounted)] == ["Qwen/big"]
    assert len(CATALOG.targets) == 3 * len(ROUTES)


@pytest.mark.parametrize(("body", "code"), [({}, "missing_required_parameter"), ({"model": None}, "missing_required_parameter"),
                                            ({"model": ""}, "invalid_value"), ({"model": ["tiny"]}, "invalid_value")])  # fmt: skip
def test_a_body_names_its_model(body: dict[str, object], code: str) -> None:
    with pytest.raises(Refusal) as caught:
        named_model(body, None)
    assert (caught.value.code, caught.value.param) == (code, "model")


def test_a_card() -> None:
    entry = CATALOG.entries[0]
    shown = card(entry, 2048)
    assert (shown["id"], shown["object"], shown["aliases"], shown["max_model_len"]) == ("Qwen/big", "model", ["qwen", "default"], 2048)
    assert "max_model_len" not in card(entry, None)
