"""The difference of two configurations in an entry: every change, and no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.audit.configuration import differences, fingerprint, shown
from gateway.config import Config, load
from tests.gateway.config.mistakes import DOCUMENT
from tests.support.certificates import certificate

KEYS = [{"id": "a", "hash": "sha256:" + "1" * 64}]
MODEL = {"id": "m", "servers": [{"url": "http://10.0.0.1:8000"}]}
ENVIRON = {"TOKEN": "secret-of-the-environment", "OTHER": "other-secret", "KEY": "third-secret"}


def read(folder: Path, environ: dict[str, str] | None = None, **more: Any) -> Config:
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump({"models": [MODEL], "keys": KEYS} | more))
    return load(file, environ or ENVIRON)


def test_equal_configurations_do_not_differ(tmp_path: Path) -> None:
    assert differences(read(tmp_path), read(tmp_path)) == ({}, {})


def test_a_path_names_settings_and_entries(tmp_path: Path) -> None:
    before = read(tmp_path, log={"level": "info"})
    keys = [{**KEYS[0], "limits": {"requests_per_minute": 5}}, {"id": "b", "hash": "sha256:" + "2" * 64, "expires": "2030-01-01"}]
    after = read(tmp_path, models=[{**MODEL, "aliases": ["n"]}], keys=keys, log={"level": "error"})
    assert differences(before, after) == (
        {"models[m].aliases": [], "keys[a].limits": None, "log.level": "info"},
        {
            "models[m].aliases": ["n"],
            "keys[a].limits": {"requests_per_minute": 5},
            "keys[b]": {"id": "b", "hash": [{"text": "sha256:22222222…", "expires": None}], "expires": "2030-01-01T00:00:00Z"},
            "log.level": "error",
        },
    )
    assert "keys[b]" in differences(after, before)[0] and "keys[b]" not in differences(after, before)[1]


def test_another_order_is_a_difference(tmp_path: Path) -> None:
    other = {**MODEL, "id": "n"}
    before, after = read(tmp_path, models=[MODEL, other]), read(tmp_path, models=[other, MODEL])
    assert differences(before, after) == ({"models[]": ["m", "n"]}, {"models[]": ["n", "m"]})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"ledger": {"env": "ONE"}}, {"ledger": {"env": "TWO"}}),
        ({"server": {"admin": {"token": {"env": "TOKEN"}}}}, {"server": {"admin": {"token": {"env": "OTHER"}}}}),
        ({"server": {}}, {"server": {"admin": {"token": {"env": "TOKEN"}}}}),
        ({"isolate_prefix_cache": {"secret": {"env": "TOKEN"}}}, {"isolate_prefix_cache": {"secret": {"env": "OTHER"}}}),
    ],
)
def test_a_changed_secret_shows_and_its_value_does_not(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    urls = {"ONE": "postgresql://u:secret-of-the-environment@h/d", "TWO": "postgresql://u:other-secret@h/d"}
    found = differences(read(tmp_path, ENVIRON | urls, **one), read(tmp_path, ENVIRON | urls, **other))
    assert found != ({}, {}) and "***" in json.dumps(found)
    assert not any(secret in json.dumps(found) for secret in ENVIRON.values())


def test_variables_and_options_of_launches_with_secret_names_are_masked(tmp_path: Path) -> None:
    def launch(secret: str) -> dict[str, Any]:
        env = {"HF_TOKEN": secret, "PLAIN": "shown", "FROM": {"env": "TOKEN"}}
        return {
            "id": "m",
            "launch": {"env": env, "args": {"hf-token": secret, "other-token": [secret], "x": {"key": secret}, "max-model-len": 10}},
        }

    found = json.dumps(differences(read(tmp_path), read(tmp_path, models=[launch("hidden-value")])))
    assert "shown" in found and "max-model-len" in found and "hidden-value" not in found and ENVIRON["TOKEN"] not in found
    changed = differences(read(tmp_path, models=[launch("hidden-1")]), read(tmp_path, models=[launch("hidden-2")]))
    assert "hidden" not in json.dumps(changed) and changed[0].keys() == {"models[m].launch.env", "models[m].launch.args"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["vllm", "serve", "--api-key", "s3"], ["vllm", "serve", "--api-key", "***"]),
        (["vllm", "--hf-token=s3", "m"], ["vllm", "***", "m"]),
        (["x", "--passwd", "s3", "--port", "1"], ["x", "--passwd", "***", "--port", "1"]),
        (["x", "--use-key", "--port", "1"], ["x", "--use-key", "--port", "1"]),
        (["monkey", "m", "--model=a"], ["monkey", "m", "--model=a"]),
    ],
)
def test_the_secret_options_of_a_command_are_masked(command: list[str], expected: list[str]) -> None:
    assert shown(tuple(command), "command") == expected


def test_the_whole_example_has_no_secret(tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "keys.yaml").write_text("keys: []")
    after = read(tmp_path, **DOCUMENT)
    text = json.dumps(differences(read(tmp_path), after))
    assert ENVIRON["TOKEN"] not in text and "PRIVATE KEY" not in text


def test_many_differences_are_cut(tmp_path: Path) -> None:
    keys = [{"id": f"k{number}", "hash": f"sha256:{number:064}"} for number in range(300)]
    former, latter = differences(read(tmp_path), read(tmp_path, keys=keys))
    assert len(latter) <= 201 and latter["…"] == former["…"] == "only the first 200 settings are listed"


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    one = fingerprint(read(tmp_path))
    assert fingerprint(read(tmp_path)) == one != fingerprint(read(tmp_path, log={"level": "error"}))
