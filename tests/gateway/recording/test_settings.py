"""The setting ``record``: what it accepts, and the snapshot that is made of it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import ConfigurationError, load
from gateway.config.values import installed
from gateway.fleet.snapshot_builder import recording
from gateway.snapshot.snapshot import Recording
from tests.support.process import configuration, launched

KEYS = [bytes([n]) * 32 for n in (1, 2)]


def loaded(folder: Path, record: dict[str, Any]) -> Recording:
    for number, key in enumerate(KEYS):
        (folder / f"key-{number}").write_bytes(base64.b64encode(key))
    (folder / "short").write_bytes(base64.b64encode(b"short"))
    (folder / "text").write_text("a text")
    (folder / "gateway.yaml").write_text(yaml.safe_dump(configuration(launched()) | {"record": record}))
    found = load(folder / "gateway.yaml").record
    assert found is not None
    return recording(found)


def test_the_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"store": "records"}) == Recording(str(tmp_path / "records"))


def test_all_settings_of_a_folder(tmp_path: Path) -> None:
    record = {
        "store": "/var/lib/records", "keys": ["a", "b-*"], "models": ["sim/*"], "share": "5%", "retention": "36h",
        "redact": ["user", "messages.*.content"], "key": [{"file": "key-0"}, {"file": "key-1"}],
    }  # fmt: skip
    redact, keys = ("user", "messages.*.content"), tuple(KEYS)
    expected = Recording("/var/lib/records", ("a", "b-*"), ("sim/*",), 0.05, 36 * 3600.0, redact, keys)
    assert loaded(tmp_path, record) == expected


def test_one_key(tmp_path: Path) -> None:
    assert loaded(tmp_path, {"store": "records", "key": {"file": "key-1"}}).encryption_keys == (KEYS[1],)


@pytest.mark.skipif(not installed("obstore"), reason="the extra record-s3 is not installed")
def test_a_bucket(tmp_path: Path) -> None:
    url = "https://s3.example.com:9000/bucket/records/a"
    made = loaded(tmp_path, {"store": url, "access_key_id": {"file": "text"}, "secret_access_key": {"file": "text"}, "region": "eu-1"})
    assert (made.store, made.credentials, made.region) == (url, ("a text", "a text"), "eu-1")
    assert "a text" not in repr(made)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "store"),
        ({"store": "s3://bucket"}, "expected a folder, or the URL of a bucket"),
        ({"store": "https://s3.example.com"}, "expected the URL of a bucket"),
        ({"store": "https://user:password@s3.example.com/bucket"}, "expected the URL of a bucket"),
        ({"store": "https://s3.example.com/bucket?x=1"}, "expected the URL of a bucket"),
        ({"store": "https://s3.example.com/bucket/../other"}, "expected the URL of a bucket"),
        ({"store": "records", "share": 0.5}, "a share in percent"),
        ({"store": "records", "key": "a-key"}, "secrets must not be in this file"),
        ({"store": "records", "key": {"file": "short"}}, "the key is not base64 of 32 bytes"),
        ({"store": "records", "key": {"file": "text"}}, "the key is not base64 of 32 bytes"),
        ({"store": "records", "key": []}, "at least 1"),
        ({"store": "records", "models": ["sim/on"]}, "matches no model"),
        ({"store": "records", "redact": ["a..b"]}, "redact"),
        ({"store": "records", "redact": ["$.a b"]}, "redact"),
        ({"store": "records", "access_key_id": {"file": "text"}}, "a folder needs neither"),
    ],
)
def test_other_values_are_problems(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(tmp_path, record)
    assert message in "\n".join(map(str, caught.value.problems))
