"""The temporary raises of limits that are in force in the running gateway, and the limits that workers get with them.

The rules: raises end by the gateway's clock, also while the database is away and after a restart. Workers know only the raised limits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from gateway.key_management.raises import Raise, decode, encode, with_raises
from gateway.snapshot.compact import without_defaults
from gateway.snapshot.snapshot import Allowance, Key, Snapshot
from gateway.store.entries import Holder

_log = logging.getLogger("vllm_gateway.control")


class Raises:
    """The raises that are in force. ``clock`` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._in_force: dict[Holder, tuple[Raise, ...]] = {}

    def learn(self, stored: Mapping[Holder, str]) -> bool:
        """Use all stored raises, as JSON by holder, and no others. Returns whether any differ from before."""
        found: dict[Holder, tuple[Raise, ...]] = {}
        for holder, text in stored.items():
            try:
                found[holder] = decode(text)
            except ValueError as error:
                _log.error("the limits of the %s %s are not raised: %s", *holder, error)
        before, self._in_force = self._in_force, self._without_ended(found)
        return before != self._in_force

    def end(self) -> Collection[Holder]:
        """End the raises that have expired. Returns their holders."""
        before, self._in_force = self._in_force, self._without_ended(self._in_force)
        return [holder for holder, raises in before.items() if self._in_force.get(holder) != raises]

    def of(self, holder: Holder) -> tuple[Raise, ...]:
        """Return the raises of a holder that are in force."""
        return self._in_force.get(holder, ())

    def stored(self) -> dict[Holder, str]:
        """Return all raises as ``learn`` reads them."""
        return {holder: encode(raises) for holder, raises in self._in_force.items()}

    def _without_ended(self, raises: Mapping[Holder, tuple[Raise, ...]]) -> dict[Holder, tuple[Raise, ...]]:
        now = self._clock()
        left = {holder: tuple(each for each in found if each.until > now) for holder, found in raises.items()}
        return {holder: found for holder, found in left.items() if found}

    # Limits

    def snapshot(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot with raised limits."""
        if not self._in_force:
            return snapshot
        teams = {team: self._allowances(of_team) for team, of_team in snapshot.teams.items()}
        return replace(snapshot, keys=tuple(map(self._key, snapshot.keys)), teams=teams)

    def encoded(self, keys: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return encoded keys with raised limits, by ID."""
        if not self._in_force:
            return keys
        has_teams = any(kind == "team" for kind, _ in self._in_force)
        return {name: self._encoded(text) if has_teams or ("key", name) in self._in_force else text for name, text in keys.items()}

    def _encoded(self, text: bytes) -> bytes:
        key = decoded_key(text)
        raised = self._key(key)
        return text if raised is key else msgspec.msgpack.encode(without_defaults(raised))

    def _key(self, key: Key) -> Key:
        raised = self._allowances(key.allowances)
        return key if raised == key.allowances else replace(key, allowances=raised)

    def _allowances(self, allowances: Iterable[Allowance]) -> tuple[Allowance, ...]:
        return tuple(with_raises(each, raises) if (raises := self._of_name(each.holder)) else each for each in allowances)

    def _of_name(self, name: str) -> tuple[Raise, ...]:
        """Return the raises of a holder by its name in limits. The limits of single models are not raised."""
        kind, _, identity = name.partition(" ")
        return self._in_force.get(("key" if kind == "key" else "team", identity), ())


decoded_key = msgspec.msgpack.Decoder(Key).decode
"""Returns a key of the store from its encoded form."""
