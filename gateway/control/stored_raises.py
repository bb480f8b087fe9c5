"""Change the temporary raises of limits, store them, and end them at their time.

The rule: raises are stored in the database of the store if there is one, so they are in force on each of its gateways. Otherwise they are
in a file of this gateway.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from gateway.control.control import Control
from gateway.key_management.raises import Raise, RaiseChange, Work, encode
from gateway.ledger.spool import replace_synced
from gateway.snapshot.snapshot import Allowance, Key, Limits
from gateway.store.entries import Holder

_INTERVAL = 0.25  # seconds between two looks for raises that have ended
_log = logging.getLogger("vllm_gateway.control")


class StoredRaises:
    """Changes raises, and ends them. ``file`` is for a gateway without a store."""

    def __init__(self, control: Control, file: Path) -> None:
        self._control = control
        self._raises = control.raises
        self._file = file
        self._changing = asyncio.Lock()

    def load(self) -> None:
        """Learn the raises of the file, without a store."""
        if self._control.key_store is not None:
            return
        try:
            self._raises.learn({(kind, identity): text for kind, identity, text in json.loads(self._file.read_bytes())})
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            _log.error("the raises in %s cannot be read, so no limit is raised: %s", self._file, error)

    async def run(self) -> None:
        """End raises at their time, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            if ended := self._raises.end():
                for kind, identity in ended:
                    _log.info("a raise of the limits of the %s %s has ended", kind, identity)
                if self._control.key_store is not None:
                    self._control.key_store.encode_again(ended)
                self._control.raises_changed()

    def of(self, holder: Holder) -> tuple[Raise, ...]:
        """Return the raises of a holder that are in force."""
        return self._raises.of(holder)

    def allowance(self, holder: Holder) -> Allowance | None:
        """Return the limits of a key or team as they are in force; None if it does not exist. Without limits they are empty."""
        kind, identity = holder
        snapshot, keys = self._control.workers.snapshot, list(self._keys_of(holder))
        if not keys and not (kind == "team" and any(team.id == identity for team in self._control.config.teams)):
            return None
        known = [each for key in keys for each in key.allowances]
        if kind == "team" and snapshot is not None:
            known += snapshot.teams.get(identity, ())  # of tokens, which may be in a team without keys
        name = f"{kind} {identity}"
        return next((each for each in known if each.holder == name), Allowance(name, Limits()))

    def _keys_of(self, holder: Holder) -> Iterator[Key]:
        """Yield a key with the limits of a holder: one of the configuration, then one of the store."""
        kind, identity = holder
        snapshot, store = self._control.workers.snapshot, self._control.key_store
        in_yaml = () if snapshot is None else (key for key in snapshot.keys if identity == (key.id if kind == "key" else key.team))
        yield from islice(in_yaml, 1)  # all keys of a team have its limits
        stored = None if store is None else store.key(identity) if kind == "key" else store.key_of_team(identity)
        if stored is not None:
            yield stored

    async def change(self, holder: Holder, work: Work, record: Callable[[RaiseChange], None]) -> RaiseChange:
        """Change the raises of a holder. Returns those before and after, when the workers of this gateway have applied them.

        ``record`` gets them before they are stored. Raises its errors and those of ``work``, DatabaseUnavailableError, and OSError if the
        file cannot be written.
        """
        if (store := self._control.key_store) is not None:
            return await store.change(lambda service: service.change_raises(holder, work), record)
        async with self._changing:
            before = self._raises.of(holder)
            done = RaiseChange(before, work(before))
            await asyncio.to_thread(record, done)
            stored = self._raises.stored() | {holder: encode(done.after)}
            await asyncio.to_thread(_write, self._file, [(*each, text) for each, text in stored.items()])
            self._raises.learn(stored)
            self._control.raises_changed()
            await self._control.wait_applied(self._control.publisher.publish_health())
            return done


def raises_file(config: Path, state: Path) -> Path:
    """Return the file with the raises of a gateway without a store, by the path of its configuration."""
    return state / "raises" / f"{hashlib.sha256(os.path.abspath(config).encode()).hexdigest()[:16]}.json"


def _write(file: Path, document: object) -> None:
    """Replace a file as a whole, durably. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_synced(file, json.dumps(document).encode())
