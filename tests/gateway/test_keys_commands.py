"""The life of a key, by command: made, replaced, revoked, listed, taken over; and what happens to the file meanwhile."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.auth import Keyring
from gateway.config import Config, load
from gateway.errors import Refusal
from gateway.keys import hash_of, mint, well_formed
from gateway.plan import Knowledge, state
from tests.gateway.test_cli import Ran, gateway

KEY, OLDER = mint("team-a"), mint("team-a")
FILE = f"""\
# The gateway of the second floor.
models:
    - {{id: Qwen/Q, launch: {{}}}}    # the only one

keys:
  # whoever is first
  - id: team-a     # do not touch
    hash: {hash_of(KEY)}
    models: ["Qwen/*"]
  - id: two
    hash:
      - {hash_of("one")}   # the laptop
      - {hash_of("two")}
  - {{id: anonymous, anonymous: true}}   # everybody

# where to log
log: {{level: info}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gateway.yaml").write_text(FILE)
    return tmp_path


def answer(config: Config, token: str) -> str:
    """Whose a key is, or why it is refused."""
    ring = Keyring(state(config, Knowledge({}, {}, {}), 1, 0).keys)
    try:
        return ring.authenticate(f"Bearer {token}".encode()).id
    except Refusal as refusal:
        return f"{refusal.code}: {refusal}"


def removed(before: str, after: str) -> list[str]:
    """The lines of one text that are not in the other."""
    left = after.splitlines()
    return [line for line in before.splitlines() if line not in left]


def secret(ran: Ran) -> str:
    """The key that a command has shown, once."""
    key = ran.out.splitlines()[0]
    assert ran.code == 0 and well_formed(key) and (ran.out + ran.err).count(key) == 1 and "not shown again" in ran.err
    return key


def test_a_new_key_is_written_where_it_is_wanted(folder: Path) -> None:
    ran = gateway(
        "keys", "new", "--id", "team-b", "--models", "Qwen/*", "--expires", "2999-01-01", "--requests-per-minute", "60", "--write",
        folder=folder,
    )  # fmt: skip
    key, text = secret(ran), (folder / "gateway.yaml").read_text()
    assert ran.err.startswith("team-b is in gateway.yaml\n")
    assert removed(FILE, text) == [] and key not in text
    made = load(folder / "gateway.yaml").keys[-1]
    assert made.limits is not None and (made.models, made.limits.requests_per_minute) == (("Qwen/*",), 60)
    assert answer(load(folder / "gateway.yaml"), key) == "team-b"
    assert secret(gateway("keys", "new", "--id", "team-c", "--config", "gateway.yaml", folder=folder))


def test_a_keys_file_takes_it_where_the_main_file_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("models: [{id: m, launch: {}}]\nkeys_file: more/keys.yaml\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "keys.yaml").write_text(f"# ours\n- {{id: a, hash: {hash_of('a')}}}\n")
    key = secret(gateway("keys", "new", "--id", "b", "--write", folder=tmp_path))
    assert (tmp_path / "more" / "keys.yaml").read_text().startswith(f'# ours\n- {{id: a, hash: {hash_of("a")}}}\n- id: "b"\n')
    assert answer(load(tmp_path / "gateway.yaml"), key) == "b"
    assert gateway("keys", "revoke", "a", folder=tmp_path) == Ran(0, "a is revoked in more/keys.yaml\n", "")


def test_a_rotated_key_overlaps_with_the_former_one(folder: Path) -> None:
    new = secret(gateway("keys", "rotate", "team-a", "--overlap", "1h", folder=folder))
    text, config = (folder / "gateway.yaml").read_text(), load(folder / "gateway.yaml")
    assert removed(FILE, text) == [f"    hash: {hash_of(KEY)}"]
    [former, latter] = config.keys[0].hashes
    assert (former.text, latter.text, latter.expires) == (hash_of(KEY), hash_of(new), None)
    assert former.expires is not None
    assert timedelta(minutes=58) < former.expires - datetime.now(UTC) <= timedelta(hours=1)
    assert (answer(config, KEY), answer(config, new)) == ("team-a", "team-a")
    # what has ended goes with the next one, what has not keeps its end
    ended = text.replace(former.expires.strftime("%Y-%m-%dT%H:%M:%SZ"), "2020-01-01T00:00:00Z")
    (folder / "gateway.yaml").write_text(ended)
    assert answer(load(folder / "gateway.yaml"), KEY) == "expired_api_key: This API key has expired."
    newest = secret(gateway("keys", "rotate", "team-a", folder=folder))
    assert [one.text for one in load(folder / "gateway.yaml").keys[0].hashes] == [hash_of(new), hash_of(newest)]


def test_a_key_can_be_replaced_at_once(folder: Path) -> None:
    new = secret(gateway("keys", "rotate", "two", "--overlap", "0s", folder=folder))
    config = load(folder / "gateway.yaml")
    assert answer(config, new) == "two"
    assert [one.text for one in config.keys[1].hashes] == [hash_of(new)]


def test_comments_beside_hashes_stay(folder: Path) -> None:
    secret(gateway("keys", "rotate", "two", folder=folder))
    text = (folder / "gateway.yaml").read_text()
    assert f"      - {{hash: {hash_of('one')}, expires: " in text and "}   # the laptop\n" in text


def test_a_revoked_key_is_refused_even_where_strangers_are_served(folder: Path) -> None:
    assert answer(load(folder / "gateway.yaml"), "one") == "two"
    assert gateway("keys", "revoke", "two", folder=folder) == Ran(0, "two is revoked in gateway.yaml\n", "")
    config = load(folder / "gateway.yaml")
    assert answer(config, "one") == answer(config, "two") == "invalid_api_key: This API key has been revoked."
    assert answer(config, "unknown") == "anonymous"
    assert gateway("keys", "revoke", "two", folder=folder) == Ran(0, "two was revoked already\n", "")
    assert gateway("keys", "verify", "gateway.yaml", stdin="one", folder=folder) == Ran(1, "", "vllm-gateway: two: revoked\n")
    assert gateway("keys", "rotate", "two", folder=folder).err == "vllm-gateway: two is revoked, and so would its new key be\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["rotate", "team-x"], 1, "vllm-gateway: there is no key team-x in gateway.yaml"),
        (["revoke", "anonymous"], 1, "vllm-gateway: anonymous is for requests that bring no key; take it out of the file to refuse them"),
        (["rotate", "team-a", "--overlap", "soon"], 2, "vllm-gateway: --overlap: expected a duration with its unit"),
        (["new", "--id", "team-a", "--write"], 2, "gateway.yaml: keys[3].id: this key id is already on line 7"),
        (["new", "--id", "b", "--models", "nothing", "--write"], 2, "gateway.yaml: keys[3].models[0]: matches no model"),
        (["new", "--id", "b", "--concurrent", "0"], 2, "vllm-gateway: --concurrent: expected 1 or more, found 0"),
        (["revoke", "team-a", "--config", "other.yaml"], 1, "vllm-gateway: other.yaml cannot be read: No such file or directory"),
        (["import", "other.txt"], 1, "vllm-gateway: other.txt cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_file_stays(folder: Path, words: list[str], code: int, said: str) -> None:
    ran = gateway("keys", *words, folder=folder)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert ran.err.startswith(said)
    assert (folder / "gateway.yaml").read_text() == FILE
    assert [path.name for path in folder.iterdir()] == ["gateway.yaml"]


def test_a_form_that_cannot_be_edited_is_left_alone(folder: Path) -> None:
    text = "models: [{id: m, launch: {}}]\nkeys: ~\n"
    (folder / "gateway.yaml").write_text(text)
    ran = gateway("keys", "new", "--id", "a", "--write", folder=folder)
    assert ran.code == 1 and ran.out == "" and "gateway.yaml is not written in a form that can be edited" in ran.err
    assert (folder / "gateway.yaml").read_text() == text


def test_what_a_mapping_has_by_a_merge_is_set_beside_it(folder: Path) -> None:
    text = f"models: [{{id: m, launch: {{}}}}]\nkeys:\n  - {{id: a, <<: &h {{hash: {hash_of('a')}}}}}\n"
    (folder / "gateway.yaml").write_text("\ufeff" + text)
    key = secret(gateway("keys", "rotate", "a", folder=folder))
    config = load(folder / "gateway.yaml")
    assert (answer(config, "a"), answer(config, key)) == ("a", "a")
    assert (folder / "gateway.yaml").read_text().startswith("\ufeffmodels: [{id: m, launch: {}}]\n")


def test_the_files_mode_owner_and_link_stay(folder: Path) -> None:
    real = folder / "elsewhere" / "real.yaml"
    real.parent.mkdir()
    (folder / "gateway.yaml").rename(real)
    (folder / "gateway.yaml").symlink_to(real)
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 12345, 23456)
    before = real.stat()
    assert gateway("keys", "revoke", "team-a", folder=folder).code == 0
    after = real.stat()
    assert (folder / "gateway.yaml").is_symlink() and "revoked: true" in real.read_text()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, before.st_uid, before.st_gid)


def test_a_secret_that_is_out_of_reach_here_is_no_reason_to_refuse(folder: Path) -> None:
    server = "    - {id: far, servers: [{url: 'http://10.0.0.1', api_key: {env: NOT_SET_HERE}}]}\n"
    (folder / "gateway.yaml").write_text(FILE.replace("\nkeys:", server + "\nkeys:", 1))
    assert gateway("keys", "revoke", "team-a", folder=folder) == Ran(0, "team-a is revoked in gateway.yaml\n", "")


def test_the_list(folder: Path) -> None:
    soon, (end, *_) = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%dT%H:%M:%SZ"), ("2020-01-01T00:00:00Z",)
    more = f"""  - {{id: ending, hash: [{{hash: {hash_of("x")}, expires: {soon}}}], limits: {{requests_per_minute: 5}}}}
  - {{id: ended, hash: {hash_of("y")}, expires: {end}}}
  - {{id: gone, hash: {hash_of("z")}, revoked: true}}
"""
    text = FILE.replace("\n# where", more + "\n# where")
    (folder / "gateway.yaml").write_text(text)
    ran = gateway("keys", "list", "--json", folder=folder)
    listed: dict[str, dict[str, Any]] = {one["id"]: one for one in json.loads(ran.out)}
    assert {name: one["state"] for name, one in listed.items()} == {
        "team-a": "valid", "two": "valid", "anonymous": "no key", "ending": "ends soon", "ended": "expired", "gone": "revoked",
    }  # fmt: skip
    assert listed["ending"] == {
        "id": "ending", "state": "ends soon", "team": None, "models": ["*"], "expires": None, "hashes": 1, "hashes_end": [soon],
        "tokens": False, "limits": {"requests_per_minute": 5}, "last_used": None,
    }  # fmt: skip
    plain = gateway("keys", "list", folder=folder)
    assert plain.code == 0 and "sha256" not in plain.out and "requests_per_minute 5" in plain.out
    assert [line.split()[0] for line in plain.out.splitlines()[1:]] == list(listed)


LITELLM = {
    "keys": [
        {"token": hash_of("sk-l1").removeprefix("sha256:"), "key_alias": "lite", "models": ["Qwen/Q"], "expires": "2999-05-01T10:00:00Z",
         "rpm_limit": 10, "tpm_limit": 1000, "max_parallel_requests": 2},
        {"token": hash_of("sk-l2").removeprefix("sha256:"), "key_alias": None, "models": ["all-team-models"], "blocked": True},
    ],
    "total_count": 2,
}  # fmt: skip


def test_keys_of_another_gateway_stay_good(folder: Path) -> None:
    (folder / "keys.txt").write_text(f'# exported\nsk-first\nalice,sk-second\n\n{KEY}\nbob , "sk-third"\ncarol,{hash_of("sk-fourth")}\n')
    ran = gateway("keys", "import", "keys.txt", folder=folder)
    assert ran == Ran(0, "4 keys added to gateway.yaml; 1 was known already\n", "")
    text, config = (folder / "gateway.yaml").read_text(), load(folder / "gateway.yaml")
    assert "sk-" not in text and removed(FILE, text) == []
    first = f"imported-{hash_of('sk-first').removeprefix('sha256:')[:8]}"
    owners = {"sk-first": first, "sk-second": "alice", "sk-third": "bob", "sk-fourth": "carol", KEY: "team-a"}
    assert {token: answer(config, token) for token in owners} == owners
    assert gateway("keys", "import", "keys.txt", folder=folder).out == "0 keys added to gateway.yaml; 5 were known already\n"


def test_litellms_hashes_are_ours(folder: Path) -> None:
    (folder / "keys.json").write_text(json.dumps(LITELLM))
    assert gateway("keys", "import", "keys.json", folder=folder).out == "2 keys added to gateway.yaml\n"
    config = load(folder / "gateway.yaml")
    assert answer(config, "sk-l1") == "lite"
    assert answer(config, "sk-l2").startswith("invalid_api_key: This API key has been revoked")
    lite = next(key for key in config.keys if key.id == "lite")
    assert lite.limits is not None and lite.expires is not None
    assert (lite.models, lite.limits.concurrent, lite.limits.tokens_per_minute, lite.expires.year) == (("Qwen/Q",), 2, 1000, 2999)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sk-good\nsk two words\n", "keys.txt: line 2 is no key: expected a key of 1 to 512 visible characters, or id,key"),
        ("{oops", "keys.txt: the file begins like JSON and is none"),
        ('{"data": []}', "keys.txt: the JSON has no list of keys"),
        ('["sk-plain-in-json"]', "keys.txt: key 0 of the JSON has no `token` that is a SHA-256 in hexadecimal digits"),
        ("a b,sk-hidden\n", "keys.txt: key 1, id: must not hold spaces or control characters"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_told_without_repeating_it(folder: Path, text: str, said: str) -> None:
    (folder / "keys.txt").write_text(text)
    assert gateway("keys", "import", "keys.txt", folder=folder) == Ran(1, "", f"vllm-gateway: {said}\n")
    assert (folder / "gateway.yaml").read_text() == FILE


def test_a_hash_can_have_an_end_in_every_form(tmp_path: Path) -> None:
    one = {"hash": hash_of("x"), "expires": "2999-01-01"}
    for written in (hash_of("x"), [hash_of("x")], one, [one], [one, hash_of("y")]):
        file = tmp_path / "gateway.yaml"
        file.write_text(
            yaml.safe_dump({"models": [{"id": "m", "launch": {}}], "keys": [{"id": "k", "hash": written, "expires": "2998-01-01"}]})
        )
        assert answer(load(file), "x") == "k"
    for wrong in ({"hash": hash_of("x"), "ends": 1}, {"expires": "2999-01-01"}, [{"hash": "x"}], {"hash": hash_of("x"), "expires": "soon"}):
        file.write_text(yaml.safe_dump({"models": [{"id": "m", "launch": {}}], "keys": [{"id": "k", "hash": wrong}]}))
        ran = gateway("check", "gateway.yaml", folder=tmp_path)
        assert ran.code == 2 and ": keys[0].hash" in ran.out and ran.out.count("\n") == 1
