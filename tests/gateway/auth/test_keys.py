"""Keys: the form, the checksum that catches a slip, the hash."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth import keys

TOKEN = "sk-5oH2aBBs_kLjYUUjKobGAMBsu5e1BQpOlczpvnbHeVlqgtbAA8ZJ_2CZ2H4"


def test_a_known_key_stays_known() -> None:
    assert keys.has_valid_checksum(TOKEN)
    assert keys.visible_id("team-a") == "5oH2aBBs"
    assert keys.hash_of(TOKEN) == "sha256:85948e09648636c87ea46898cff098683d5bd90ffe6488bda4765850957d2df2"


def test_a_minted_key_has_the_published_form() -> None:
    prefix, random_part, checksum = keys.mint("team-a").split("_")
    assert prefix == "sk-" + keys.visible_id("team-a")
    assert (len(random_part), len(checksum)) == (43, 6)
    assert set(random_part + checksum) <= set(keys.BASE62)
    assert 62**43 > 2**190


def test_keys_of_one_principal_share_only_the_visible_part() -> None:
    minted = [keys.mint("team-a") for _ in range(200)]
    assert len({key.split("_")[1] for key in minted}) == 200
    assert len({key.split("_")[0] for key in minted}) == 1
    assert keys.visible_id("team-a") != keys.visible_id("team-b")
    # every position of the random part takes many values: none is fixed or drawn from a small alphabet
    assert all(len(set(column)) > 30 for column in zip(*(key.split("_")[1] for key in minted), strict=True))


def test_the_checksum_catches_every_change_of_one_character() -> None:
    for at in range(len(TOKEN)):
        for other in keys.BASE62 + "_- é":
            changed = TOKEN[:at] + other + TOKEN[at + 1 :]
            assert keys.has_valid_checksum(changed) == (changed == TOKEN), (at, other)


def test_a_mistyped_key_is_still_recognized_as_ours() -> None:
    mistyped = TOKEN[:-1] + "5"
    assert keys.has_key_format(mistyped)
    assert not keys.has_valid_checksum(mistyped)


@pytest.mark.parametrize(
    "token", ["", "sk-", "sk-abc", TOKEN + "\n", " " + TOKEN, TOKEN[:-1], TOKEN + "a", TOKEN.replace("sk-", "SK-"), "dummy"]
)
def test_other_strings_are_not_in_our_form(token: str) -> None:
    assert not keys.has_key_format(token)
    assert not keys.has_valid_checksum(token)


@given(st.text(min_size=1, max_size=40))
def test_any_principal_gets_a_well_formed_key(key_id: str) -> None:
    if key_id.encode("utf-8", "ignore").decode() == key_id:
        assert keys.has_valid_checksum(keys.mint(key_id))


def test_any_string_has_a_hash() -> None:
    assert keys.hash_of("test") == "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    assert keys.hash_of("\ud800").startswith("sha256:")


def test_the_data_path_gets_nothing_heavy_with_it() -> None:
    code = "import sys, gateway.auth.keys; print([name for name in ('pydantic', 'yaml', 'typer', 'rich') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
