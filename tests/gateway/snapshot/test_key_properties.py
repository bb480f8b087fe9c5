"""Every property of a key exists in all its places: the configuration, the snapshot, the commands, the documents."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from gateway.config import Key as WrittenKey
from gateway.config import load, schema
from gateway.fleet.observed_servers import ObservedServers
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.snapshot.key_properties import OPTIONS, PROPERTIES, KeyProperties
from gateway.snapshot.link import ApplySnapshot, Health, Message, encode
from gateway.snapshot.snapshot import Key
from tests.gateway.cli.test_main import gateway
from tests.gateway.config.test_models import HASH
from tests.gateway.snapshot.test_link import pair

CONVERTED = {
    "hashes": ("digests", "digest_expiries"),
    "limits": ("allowances",),
    "priority": ("fields", "weight"),
    **{name: (name,) for name in ("id", "models", "expires", "user_header", "queue_class")},
}
"""The settings that a worker reads in another form, and the fields of that form. A class is written as ``class``, a keyword of Python."""
OF_A_TOKEN = {"entry", "within"}
"""The fields that a worker sets for the subject of a token."""
OF_THE_TEAM = {"team_weight"}
"""The field that a key of the store has of its team."""
SAMPLES: dict[type, Any] = {bool: True, int: 3, float: 0.5, str: "a-value", dict: {"name": "a value"}}


def sample(name: str) -> Any:
    """Return a value of a property that is not its default."""
    hint = get_type_hints(KeyProperties)[name]
    kinds = [getattr(kind, "__origin__", kind) for kind in (hint, *get_args(hint))]
    return next(SAMPLES[kind] for kind in kinds if kind in SAMPLES)


def configured(folder: Path, name: str) -> Path:
    """Write a configuration whose second key has a value of a property, the first its default."""
    key = {"id": "b", "hash": HASH.replace("9f", "8f"), name: sample(name)}
    if key.get("anonymous"):
        del key["hash"]
    document = {
        "models": [{"id": "m", "servers": [{"url": "http://127.0.0.1:1"}]}],
        "keys": [{"id": "a", "hash": HASH}, key],
        "teams": [{"id": SAMPLES[str]}],
    }
    (file := folder / "gateway.yaml").write_text(yaml.safe_dump(document))
    return file


def test_a_setting_of_a_key_is_a_declared_property_or_is_converted() -> None:
    hint = "declare it in gateway/snapshot/key_properties.py, or convert it in snapshot_builder and list it in CONVERTED"
    assert set(WrittenKey.model_fields) == {*PROPERTIES, *CONVERTED}, hint
    converted = {field for of_setting in CONVERTED.values() for field in of_setting}
    assert {each.name for each in fields(Key)} == {*PROPERTIES, *converted, *OF_A_TOKEN, *OF_THE_TEAM}, hint


@pytest.mark.parametrize("name", PROPERTIES)
async def test_a_property_reaches_the_worker(tmp_path: Path, name: str) -> None:
    snapshot = build_snapshot(load(configured(tmp_path, name)), ObservedServers({}, {}, {}), 1, 0)
    received: list[Message] = []
    async with pair() as (link, writer):
        writer.write(encode(ApplySnapshot(snapshot, Health({}, {}))))
        writer.close()
        received += [message async for message in link.messages()]
    match received:
        case [ApplySnapshot(snapshot=made)]:
            values = [getattr(key, name) for key in made.keys]
            assert values == [getattr(Key("x"), name), sample(name)]
        case _:
            pytest.fail(f"received {received}")


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_is_described(name: str) -> None:
    assert schema()["$defs"]["Key"]["properties"][name]["description"]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_property_with_an_option_is_set_and_listed(tmp_path: Path, name: str) -> None:
    file, value = configured(tmp_path, name), sample(name)
    option = f"--{name.replace('_', '-')}"
    given = [option] if value is True else [option, str(value)]
    assert gateway("keys", "new", "--id", "c", *given, "--write", folder=tmp_path).code == 0
    assert [getattr(key, name) for key in load(file).keys] == [getattr(Key("x"), name), value, value]
    listed = yaml.safe_load(gateway("keys", "list", "--json", folder=tmp_path).out)
    assert [key[name] for key in listed] == [getattr(Key("x"), name), value, value]
    assert name.replace("_", " ") in gateway("keys", "list", folder=tmp_path).out.splitlines()[0]
