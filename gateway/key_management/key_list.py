"""List the entries of keys for operators: states, expiry, limits, last use. Pure.

The rule: nothing that identifies a key, not even its hash, is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from gateway.config import Config, Key
from gateway.snapshot.key_properties import OPTIONS

M = TypeVar("M", datetime, float)
SOON = timedelta(days=14)
"""An entry that expires within this time is shown as ending soon."""


@dataclass(frozen=True, slots=True)
class LastUse:
    """When entries were last used, by id, as far as the ledger has records; ``unknown`` explains why no time is known."""

    times: Mapping[str, datetime] = field(default_factory=dict)
    unknown: str | None = None


def list_keys(config: Config, use: LastUse, now: datetime) -> dict[str, Any]:
    """List all entries, for programs. ``now`` is aware."""
    of_tokens = token_entries(config)
    shown = [shown_key(key, use.times.get(key.id), now, of_tokens=key.id in of_tokens) for key in config.keys]
    return {"keys": shown, "last_use_unknown": use.unknown}


def token_entries(config: Config) -> frozenset[str]:
    """Return the IDs of the entries that are used for tokens of identity providers."""
    return frozenset(name for issuer in config.jwt for name in issuer.keys)


def shown_key(key: Key, last: datetime | None, now: datetime, *, of_tokens: bool = False) -> dict[str, Any]:
    """Return an entry, for programs. ``last`` is when it was last used, and ``of_tokens`` whether it is used for tokens."""
    of_hashes = sorted(one.expires for one in key.hashes if one.expires is not None)
    return {
        "id": key.id,
        "state": state(key, now),
        **{name: getattr(key, name) for name in OPTIONS},
        "labels": dict(key.labels),
        "models": list(key.models),
        "expires": instant(key.expires) if key.expires else None,
        "hashes": len(key.hashes),
        "hashes_end": [instant(each) for each in of_hashes],
        "tokens": of_tokens,
        "limits": key.limits.model_dump(exclude_defaults=True) if key.limits else {},
        "last_used": instant(last) if last else None,
    }


def state(key: Key, now: datetime) -> str:
    """Return the state of an entry, for people."""
    if key.revoked:
        return "revoked"
    last = expiry(key)
    if last is not None and last <= now:
        return "expired"
    if key.anonymous:
        return "no key"
    return "ends soon" if last is not None and last <= now + SOON else "valid"


def expiry(key: Key) -> datetime | None:
    """Return when the last key of an entry expires: its own expiry, or the latest expiry of its hashes.

    None if it does not expire, or is revoked.
    """
    return None if key.revoked else last_expiry(key.expires, [one.expires for one in key.hashes])


def last_expiry(own: M | None, of_hashes: Sequence[M | None]) -> M | None:
    """Return when an entry with this expiry, and hashes with these, admits no more requests; None for an expiry is never."""
    last = max((each for each in of_hashes if each is not None), default=None) if None not in of_hashes else None
    return min((each for each in (own, last) if each is not None), default=None)


def instant(moment: datetime) -> str:
    """Write a time in UTC, to the second."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def instant_of(seconds: float) -> str:
    """Write a time, in seconds since the epoch, as ``instant`` does."""
    return instant(datetime.fromtimestamp(seconds, UTC))
