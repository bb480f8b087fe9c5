"""The keys of the store in a worker: changes touch the keys that they name, and a digest belongs to the key that was added last."""

from __future__ import annotations

import time
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.auth.keyring import Keyring
from gateway.auth.keys import mint
from gateway.auth.stored_keys import StoredKeyring
from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import Key

Change = tuple[dict[str, frozenset[str]], frozenset[str], bool]
"""Parts of the digests of changed keys by ID, the IDs of removed keys, and whether all keys are replaced."""
TOKEN, OTHER = mint("alice"), mint("bob")


def digest(token: str) -> bytes:
    return sha256(token.encode()).digest()


def found(ring: Keyring, token: str) -> str:
    try:
        return ring.authenticate(f"Bearer {token}".encode()).id
    except Refusal as refusal:
        return refusal.code


def test_a_keyring_sees_each_change_at_once() -> None:
    stored = StoredKeyring()
    ring = Keyring([Key("yaml", digests=(digest("sk-yaml"),))], stored=stored)
    assert found(ring, TOKEN) == "invalid_api_key"
    stored.apply(StoredKeys((Key("alice", digests=(digest(TOKEN),)),)))
    assert (found(ring, TOKEN), found(ring, "sk-yaml")) == ("alice", "yaml")
    stored.apply(StoredKeys((Key("alice", digests=(digest(OTHER),)),)))
    assert (found(ring, TOKEN), found(ring, OTHER)) == ("invalid_api_key", "alice")
    stored.apply(StoredKeys((Key("alice", digests=(digest(OTHER),), revoked=True),)))
    with pytest.raises(Refusal, match="has been revoked"):
        ring.authenticate(f"Bearer {OTHER}".encode())
    stored.apply(StoredKeys(removed=("alice", "nobody")))
    assert found(ring, OTHER) == "invalid_api_key"
    assert (stored.by_id, stored.by_digest) == ({}, {})


def test_a_digest_and_an_entry_expire() -> None:
    stored, now = StoredKeyring(), time.time()
    ring = Keyring((), stored=stored)
    stored.apply(StoredKeys((Key("alice", digests=(digest(TOKEN), digest(OTHER)), digest_expiries={digest(TOKEN): now - 1}),)))
    assert (found(ring, TOKEN), found(ring, OTHER)) == ("expired_api_key", "alice")
    stored.apply(StoredKeys((Key("alice", digests=(digest(OTHER),), expires=now - 1),)))
    assert found(ring, OTHER) == "expired_api_key"


def test_the_yaml_has_precedence() -> None:
    stored = StoredKeyring()
    stored.apply(StoredKeys((Key("thief", digests=(digest(TOKEN),)),)))
    assert found(Keyring([Key("yaml", digests=(digest(TOKEN),))], stored=stored), TOKEN) == "yaml"


def test_a_digest_that_moves_to_another_key_stays_with_it() -> None:
    stored = StoredKeyring()
    stored.apply(StoredKeys((Key("alice", digests=(digest(TOKEN),)),)))
    stored.apply(StoredKeys((Key("bob", digests=(digest(TOKEN),)), Key("alice", digests=(digest(OTHER),)))))
    ring = Keyring((), stored=stored)
    assert (found(ring, TOKEN), found(ring, OTHER)) == ("bob", "alice")
    stored.apply(StoredKeys(removed=("alice",)))
    assert (found(ring, TOKEN), found(ring, OTHER)) == ("bob", "invalid_api_key")


def test_keys_that_are_not_known_are_to_be_sent_again() -> None:
    stored = StoredKeyring()
    ring = Keyring([Key("yaml", digests=(digest("sk-yaml"),))], stored=stored)
    stored.apply(StoredKeys((Key("alice", digests=(digest(TOKEN),)),)))
    stored.apply(StoredKeys(is_reset=True, is_unknown=True))
    assert (found(ring, TOKEN), found(ring, "sk-yaml")) == ("overloaded", "yaml")
    assert found(ring, TOKEN[:-1] + ("0" if TOKEN[-1] != "0" else "1")) == "invalid_api_key"  # a typing error is none of them
    stored.apply(StoredKeys((Key("alice", digests=(digest(TOKEN),)),), is_reset=True))
    assert (found(ring, TOKEN), found(ring, OTHER)) == ("alice", "invalid_api_key")


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.sampled_from("12345678"), max_size=3), max_size=3),
            st.frozensets(st.sampled_from("abcd"), max_size=2),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_changes_lead_to_the_same_keys_as_all_of_them_at_once(
    changes: list[tuple[dict[str, frozenset[str]], frozenset[str], bool]],
) -> None:
    """Digests of different keys differ, as the store holds them to."""
    stored, expected = StoredKeyring(), dict[str, Key]()
    for changed, removed, is_reset in changes:
        keys = {name: Key(name, digests=tuple(digest(name + each) for each in sorted(held))) for name, held in changed.items()}
        stored.apply(StoredKeys(tuple(keys.values()), tuple(removed), is_reset=is_reset))
        expected = {name: key for name, key in ({} if is_reset else expected).items() if name not in removed} | keys
    assert stored.by_id == expected
    assert stored.by_digest == {each: key for key in expected.values() for each in key.digests}
