"""The keyring finds the key of a request."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.auth import keys
from gateway.auth.keyring import Keyring
from gateway.snapshot.snapshot import Key
from tests.support.rows import each_row
from tests.support.running import KEY, key

MINTED = keys.mint("team-a")


def code(ring: Keyring, authorization: bytes | None, api_key: bytes | None = None) -> str:
    try:
        return ring.authenticate(authorization, api_key).id
    except Refusal as refusal:
        return refusal.code


def bearer(token: str) -> bytes:
    return b"Bearer " + token.encode()


RING = Keyring(
    [key(), key("minted", MINTED), key("old", "sk-old", expires=time.time() - 1), key("new", "sk-new", expires=time.time() + 86400)]
)
OPEN = Keyring([key(), key("old", "plain-old", expires=1.0), Key("anybody", anonymous=True)])


@each_row(
    ("authorization", "api_key", "closed", "opened"),
    [
        (None, None, "missing_api_key", "anybody"),
        (b"", None, "invalid_api_key", "invalid_api_key"),
        (b"Bearer", None, "missing_api_key", "missing_api_key"),
        (b"Bearer ", None, "missing_api_key", "missing_api_key"),
        (bearer(f'"{KEY}"'), None, "invalid_api_key", "invalid_api_key"),
        (bearer("'not-needed'"), None, "invalid_api_key", "invalid_api_key"),
        (bearer("$OPENAI_API_KEY"), None, "invalid_api_key", "invalid_api_key"),
        (bearer("<key>"), None, "invalid_api_key", "invalid_api_key"),
        (bearer("`cat key`"), None, "invalid_api_key", "invalid_api_key"),
        (bearer("{key}"), None, "invalid_api_key", "invalid_api_key"),
        (None, b'"not-needed"', "invalid_api_key", "invalid_api_key"),
        (bearer(KEY), None, "team-a", "team-a"),
        (b"bearer   " + KEY.encode() + b"  ", None, "team-a", "team-a"),
        (b"BEARER " + KEY.encode(), None, "team-a", "team-a"),
        (None, KEY.encode(), "team-a", "team-a"),
        (None, b"", "missing_api_key", "missing_api_key"),
        (None, b"not-needed", "invalid_api_key", "anybody"),
        (bearer("wrong"), KEY.encode(), "invalid_api_key", "anybody"),
        (KEY.encode(), None, "invalid_api_key", "invalid_api_key"),
        (b"Basic " + KEY.encode(), None, "invalid_api_key", "invalid_api_key"),
        (b"Bearer\t" + KEY.encode(), None, "invalid_api_key", "invalid_api_key"),
        (bearer(KEY + "\n"), None, "invalid_api_key", "invalid_api_key"),
        (bearer(f"{KEY} {KEY}"), None, "invalid_api_key", "invalid_api_key"),
        (bearer("k" * 513), None, "invalid_api_key", "anybody"),
        (bearer("sk-" + "k" * 513), None, "invalid_api_key", "invalid_api_key"),
        (bearer("not-needed"), None, "invalid_api_key", "anybody"),
        (bearer("not needed"), None, "invalid_api_key", "invalid_api_key"),
        (b"Bearer \xff", None, "invalid_api_key", "invalid_api_key"),
        (bearer("sk-unknown"), None, "invalid_api_key", "invalid_api_key"),
        (bearer("plain-old"), None, "invalid_api_key", "expired_api_key"),
    ],
)
def test_the_table(authorization: bytes | None, api_key: bytes | None, closed: str, opened: str) -> None:
    assert code(RING, authorization, api_key) == closed
    assert code(OPEN, authorization, api_key) == opened


@pytest.mark.parametrize("ring", [RING, OPEN])
@pytest.mark.parametrize(
    ("authorization", "sent", "text"),
    [
        (bearer(f'"{KEY}"'), (), "in quotes"),
        (bearer("`cat key`"), (), "in quotes"),
        (bearer("'key'"), (), "in quotes"),
        (bearer("$KEY"), (), "placeholder: it begins with '$'"),
        (bearer("<key>"), (), "placeholder: it begins with '<'"),
        (bearer("{key}"), (), "placeholder: it begins with '{'"),
        (bearer(f"{KEY} {KEY}"), (), "a space or another character"),
        (b"Bearer", (), "no key after 'Bearer'"),
        (b"Basic eDp5", (), "must have the form 'Bearer <key>'"),
        (KEY.encode(), (), "must have the form 'Bearer <key>'"),
        (None, (b"api-key",), "The header 'api-key' is not read here. Send the key as 'Authorization: Bearer <key>'."),
        (None, (b"x-api-key",), "The header 'x-api-key' is not read here."),
        (None, (b"x-goog-api-key", b"host"), "The header 'x-goog-api-key' is not read here."),
        (bearer("sk-" + "k" * 509), (), "The API key is not valid."),
        (bearer("sk-" + "k" * 510), (), "longer than 512 bytes"),
    ],
)
def test_a_malformed_key_is_refused_with_its_cause_whether_or_not_one_is_needed(
    ring: Keyring, authorization: bytes | None, sent: tuple[bytes, ...], text: str
) -> None:
    with pytest.raises(Refusal) as raised:
        ring.authenticate(authorization, None, sent)
    assert raised.value.spec.status == 401 and text in raised.value.message
    assert KEY not in raised.value.message


def test_another_header_does_not_keep_a_request_without_key_from_being_anonymous() -> None:
    assert OPEN.authenticate(None, None, (b"host", b"user-agent", b"x-session-id")).id == "anybody"


def test_expiry() -> None:
    assert code(RING, bearer("sk-old")) == "expired_api_key"
    assert code(RING, bearer("sk-new")) == "new"


def message(ring: Keyring, authorization: bytes | None, sent: tuple[bytes, ...] = ()) -> str:
    with pytest.raises(Refusal) as raised:
        ring.authenticate(authorization, sent=sent)
    return raised.value.message


def test_a_revoked_key_is_reported_as_revoked_and_not_as_expired() -> None:
    ring = Keyring([key(revoked=True)])
    assert code(ring, bearer(KEY)) == "invalid_api_key" and "revoked" in message(ring, bearer(KEY))


def test_an_unknown_key_with_a_valid_checksum_is_not_reported_as_mistyped() -> None:
    other = keys.mint("team-b")
    assert "mistyped" not in message(RING, bearer(other)) and "mistyped" not in message(RING, bearer("sk-other"))
    assert "mistyped" in message(RING, bearer(other[:-1] + ("a" if other[-1] != "a" else "b")))


@pytest.mark.parametrize("name", [b"x-api-key", b"api-key", b"x-goog-api-key"])
def test_a_key_in_a_header_of_another_api_is_reported(name: bytes) -> None:
    assert name.decode() in message(RING, None, (name,))


@pytest.mark.parametrize("more", [{"expires": 1.0}, {"revoked": True}])
def test_an_expired_anonymous_entry_admits_no_request(more: dict[str, Any]) -> None:
    ring = Keyring([key(), Key("anybody", anonymous=True, **more)])
    assert code(ring, None) == "missing_api_key"
    assert code(ring, bearer("not-needed")) == "invalid_api_key"
    assert code(ring, bearer(KEY)) == "team-a"
    assert code(Keyring([Key("anybody", anonymous=True, expires=time.time() + 86400)]), None) == "anybody"


def test_only_spaces_around_a_key_are_no_part_of_it() -> None:
    ring = Keyring([key("x", "xkx")])
    assert code(ring, b"Bearer  xkx ") == "x" and code(ring, b"Bearer xk") == code(ring, b"Bearer xkx\t") == "invalid_api_key"


def test_several_keys_of_one_principal() -> None:
    digests = tuple(hashlib.sha256(token).digest() for token in (b"one", b"two"))
    ring = Keyring([Key("team", digests=digests)])
    assert code(ring, b"Bearer one") == code(ring, b"Bearer two") == "team"
    assert code(Keyring([]), b"Bearer one") == "invalid_api_key"


@settings(deadline=None)
@given(st.integers(0, len(MINTED) - 1), st.sampled_from(keys.BASE62))
def test_a_typing_error_is_reported(position: int, letter: str) -> None:
    wrong = MINTED[:position] + letter + MINTED[position + 1 :]
    assert code(RING, bearer(wrong)) == ("minted" if wrong == MINTED else "invalid_api_key")
    if wrong != MINTED and keys.has_key_format(wrong):
        with pytest.raises(Refusal, match="checksum"):
            RING.authenticate(bearer(wrong))


@settings(deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_random_bytes_authenticate(authorization: bytes, api_key: bytes) -> None:
    for ring, anonymous_ids in ((RING, set[str]()), (OPEN, {"anybody"})):
        assert code(ring, authorization, api_key) in {"missing_api_key", "invalid_api_key", *anonymous_ids}
