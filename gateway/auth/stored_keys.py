"""The keys of the store in one worker: found by the digest of a key, and changed while the worker serves.

The rule: a message of control is applied in one pass, in which nothing waits. So each request sees all of it or nothing. Only the keys that
the message names are touched, however many there are. A digest belongs to one key, and is removed with it.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import Key


class StoredKeyring:
    """The keys by digest. ``is_unknown``: control knows the store's keys neither from its database nor from a copy that it may use."""

    def __init__(self) -> None:
        self.by_digest: dict[bytes, Key] = {}
        self.by_id: dict[str, Key] = {}
        self.is_unknown = False

    def apply(self, message: StoredKeys) -> None:
        """Apply a message of control."""
        if message.is_reset:
            self.by_digest.clear()
            self.by_id.clear()
        for identity in (*message.removed, *(key.id for key in message.changed)):
            former = self.by_id.pop(identity, None)
            for digest in () if former is None else former.digests:
                holder = self.by_digest.get(digest)
                if holder is not None and holder.id == identity:  # it may have moved to another key
                    del self.by_digest[digest]
        for key in message.changed:
            self.by_id[key.id] = key
            self.by_digest.update((digest, with_expiry(key, digest)) for digest in key.digests)
        self.is_unknown = message.is_unknown


def with_expiry(key: Key, digest: bytes) -> Key:
    """Return the key with the expiry of one of its digests; a revoked key is always expired."""
    times = [0.0] if key.revoked else [end for end in (key.expires, key.digest_expiries.get(digest)) if end is not None]
    return key if times in ([], [key.expires]) else replace(key, expires=min(times))
