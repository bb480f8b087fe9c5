"""Encode the keys of the store for workers. Pure.

The rule: a key is encoded as ``snapshot_builder`` makes it. Keys whose settings are equal differ only in their ID, hashes, labels and
expiry. So settings are validated and converted once, and the rest is filled in for each key, which takes a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from gateway import config as conf
from gateway.config import Config
from gateway.fleet.snapshot_builder import stored_key
from gateway.snapshot.compact import without_defaults

_ANY = "-"  # the ID of a key that is made for its settings
_HASH = "sha256:" + "0" * 64
_MAX_TEMPLATES = 1_000


class _Template(NamedTuple):
    """The common part of keys.

    ``own`` are the limits of a key with the rest of the name of their holder, ``shared`` the limits of its team.
    """

    fields: Mapping[str, Any]
    own: tuple[tuple[str, Mapping[str, Any]], ...]
    shared: tuple[Mapping[str, Any], ...]


class KeyEncoder:
    """Encodes keys for one configuration. The limits and the weight of each team must stay the same."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._templates: dict[bytes, _Template] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, entry: str, team: conf.Team | None) -> bytes:
        """Return a key, from its JSON and its team, as workers decode it. Raises ValueError for an invalid entry."""
        try:
            settings: dict[str, Any] = msgspec.json.decode(entry)
            identity, hashes, labels = settings.pop("id"), settings.pop("hash"), settings.pop("labels", None)
            expires = settings.pop("expires", None)
            settings.pop("name", None)
            template = self._template(identity, settings, team)
            digests = [bytes.fromhex((one if isinstance(one, str) else one["hash"])[7:]) for one in hashes]
            fields = {"id": identity, "digests": digests, **template.fields}
            if expiries := {bytes.fromhex(one["hash"][7:]): _time(one["expires"]) for one in hashes if not isinstance(one, str)}:
                fields["digest_expiries"] = expiries
            if labels is not None:
                fields["labels"] = labels
            if expires is not None:
                fields["expires"] = _time(expires)
            if template.own or template.shared:
                own = ({**limits, "holder": f"key {identity}{rest}"} for rest, limits in template.own)
                fields["allowances"] = [*own, *template.shared]
            return self._encoder.encode(fields)
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise ValueError("the entry is invalid") from error

    def _template(self, identity: str, settings: Mapping[str, Any], team: conf.Team | None) -> _Template:
        if self._config.isolate_prefix_cache is not None:
            return self._made(identity, settings, team)  # each key has its own salt
        known = msgspec.json.encode(settings)
        if (found := self._templates.get(known)) is None:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            found = self._templates[known] = self._made(_ANY, settings, team)
        return found

    def _made(self, identity: str, settings: Mapping[str, Any], team: conf.Team | None) -> _Template:
        key = stored_key(conf.Key.model_validate({**settings, "id": identity, "hash": _HASH}), self._config, team)
        mark = f"key {identity}"
        own = [each for each in key.allowances if each.holder.startswith(mark)]
        fields = without_defaults(replace(key, digests=(), allowances=()))
        del fields["id"]
        limits = ((each.holder[len(mark) :], without_defaults(each)) for each in own)
        return _Template(fields, tuple(limits), tuple(without_defaults(each) for each in key.allowances if each not in own))


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
