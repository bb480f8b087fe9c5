"""Detect the format of another gateway's key file, and reject invalid lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.auth.keys import hash_of, mint
from gateway.key_management.keys_import import BadLineError, read_keys, sort_keys
from tests.support.rows import each_row

KEY = mint("team-a")
FIRST, SECOND, THIRD = (f"sk-{ordinal}-0123456789" for ordinal in ("first", "second", "third"))


def listed(token: str, **more: Any) -> dict[str, Any]:
    """Return one LiteLLM key in the form of LiteLLM's list."""
    return {"token": hash_of(token).removeprefix("sha256:"), **more}


@pytest.mark.parametrize(
    ("text", "owners"),
    [
        (f"{FIRST}\nalice,{SECOND}\n", {FIRST: None, SECOND: "alice"}),
        (f"key,id\n{FIRST},alice\n{SECOND}\n", {FIRST: "alice", SECOND: None}),
        (f"# exported\n\nName, API_Key\nalice,{FIRST}\n", {FIRST: "alice"}),
        (f'"token","alias"\n"{FIRST}","alice"\n', {FIRST: "alice"}),
        (f"key\n{FIRST}\n", {FIRST: None}),
        ("alice,QWERTYUIOPasdfghjkl\n", {"QWERTYUIOPasdfghjkl": "alice"}),
        ("\n# nothing\n", {}),
    ],
)
def test_whose_keys_they_are(text: str, owners: dict[str, str | None]) -> None:
    named = {token: owner or f"imported-{hash_of(token).removeprefix('sha256:')[:8]}" for token, owner in owners.items()}
    assert {one.entry["hash"]: one.entry["id"] for one in read_keys(text)} == {hash_of(token): owner for token, owner in named.items()}


@each_row(
    ("text", "expected"),
    [
        (f"{FIRST}\nsk two words of text\n", "line 2 is not a key: expected a key, or id,key, of 16 to 512 visible characters"),
        ("{oops", "the file starts like JSON but is not valid JSON"),
        ('{"data": []}', "the JSON has no list of keys"),
        ('["sk-plain-in-json"]', "key 1 has no `token` that is a SHA-256 in hexadecimal digits"),
        (f"{hash_of('x')},{FIRST}\n", "line 1: the id looks like a key; expected a key, or id,key, or a first line key,id"),
        (f"alice,{FIRST}\n{SECOND},bob\n", "line 2: the key has fewer than 16 characters; expected a key, or id,key"),
        ("sk-a1,the-owner-of-this\n", "line 1: the key consists of plain words, which can be guessed; expected a key, or id,key"),
        (f"team-z,{FIRST},extra-extra-extra-1\n", "line 1 has more than one comma: expected a key, or id,key"),
        (f"key,owner\n{FIRST},alice\n", "line 1 is an unknown header: expected key, or id,key, or key,id"),
        (f"alice,{FIRST}\nbob,{FIRST}\n", "line 2 has the key of line 1, with other values"),
        (f"alice,{FIRST}\nalice,{SECOND}\n", "line 2: line 1 has this id with another key"),
        (f"{KEY}\nbob,{FIRST}\ntwo,{SECOND}\n", "line 3: the configuration has another key with this id"),
        (json.dumps([listed("a"), listed("b", key_alias="sk-0123")]),
         "key 2: the id looks like a key; expected a key, or id,key, or a first line key,id"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_imported_is_reported_without_its_keys(text: str, expected: str) -> None:
    with pytest.raises(BadLineError) as raised:
        sort_keys(read_keys(text), {hash_of(KEY)}, {"team-a", "two"})
    assert str(raised.value) == expected
