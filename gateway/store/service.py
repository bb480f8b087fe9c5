"""Change the keys and teams of the store. Each method is one transaction: read, decide, write.

The rule: a key is in no row and no message; it is returned once, by the call that creates it. Calls belong on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any, NamedTuple, Protocol, TypeVar

from gateway.access.actor import PersonId
from gateway.auth import keys
from gateway.config import Key, SelfService
from gateway.key_management.keys_import import BadLineError, ImportedKey, SortedKeys, read_keys, sort_keys, without_unknown_teams
from gateway.key_management.raises import RaiseChange, Work, decode, encode
from gateway.store import decisions, self_service
from gateway.store.database import KeyDatabase, Transaction
from gateway.store.decisions import Named, check_version
from gateway.store.entries import Holder, Repeatable, Row, StoredKey, StoredTeam, key_json, stored_key, stored_team, team_json
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.self_service import Grant

CHANGE_TIMEOUT = 15.0
"""Seconds for a change."""
T = TypeVar("T")


class Store(Protocol):
    """The store of a running gateway."""

    async def change(self, work: Callable[[KeyService], T], record: Callable[[T], None], seconds: float = CHANGE_TIMEOUT) -> T:
        """Run a change. ``record`` gets its result on a thread, before the commit.

        Raises RefusedChangeError, what ``record`` raises, and DatabaseUnavailableError also after ``seconds``.
        """

    async def read(self, work: Callable[[KeyDatabase], T]) -> T:
        """Run a query. Raises DatabaseUnavailableError."""


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A changed key: before and after. ``secret`` is a key that was created by the change. ``is_repeated``: it was changed earlier."""

    after: StoredKey
    before: StoredKey | None = None
    secret: str | None = None
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class TeamChange:
    """A changed team: before and after. ``is_repeated``: it was changed earlier."""

    after: StoredTeam
    before: StoredTeam | None = None
    is_repeated: bool = False


class ImportedKeys(NamedTuple):
    """The keys that were added, the number of keys that were known, and messages about duplicates and restrictions left out."""

    added: Sequence[StoredKey]
    known: int
    messages: Sequence[str]


class KeyService:
    """Changes the store's database. ``named`` returns what the configuration names at the moment."""

    def __init__(self, database: KeyDatabase, named: Callable[[], Named]) -> None:
        self._database = database
        self._named = named

    # Keys

    def create_key(self, fields: Mapping[str, Any], repeatable: Repeatable | None = None) -> KeyChange:
        """Create a key. Raises RefusedChangeError and DatabaseUnavailableError, as all methods do."""
        named, now = self._named(), datetime.now(UTC)

        def work(transaction: Transaction) -> KeyChange:
            if (earlier := _repeated(transaction, repeatable)) is not None:
                return _earlier(transaction, earlier)
            secret = keys.mint(str(fields.get("id")))
            key, name = decisions.new_key(fields, keys.hash_of(secret), named, transaction.teams(), now)
            added = transaction.add("key", key.id, key_json(key, name))
            _remember(transaction, repeatable, key.id)
            return KeyChange(stored_key(added), secret=secret)

        return self._database.change(work, now)

    def create_own_key(self, maker: PersonId, grant: Grant, fields: Mapping[str, Any], repeatable: Repeatable | None = None) -> KeyChange:
        """Create a key for a person, within the policy of a team. Its ID is random, so that no ID of others can be tried."""
        named, now, team = self._named(), datetime.now(UTC), self_service.chosen_team(fields, grant)
        identity = f"key-{token_hex(6)}"
        secret = keys.mint(identity)

        def work(transaction: Transaction) -> KeyChange:
            if (earlier := _repeated(transaction, repeatable)) is not None:
                return _earlier(transaction, earlier, grant)
            policy = self_service.check_policy(team, _policy(transaction, team, named), grant)
            held, teams = [stored_key(row) for row in transaction.made_by(maker)], transaction.teams()
            key, name = self_service.new_own_key(identity, fields, keys.hash_of(secret), policy, held, named, teams, now)
            added = transaction.add("key", key.id, key_json(key, name), maker)
            _remember(transaction, repeatable, key.id)
            return KeyChange(stored_key(added), secret=secret)

        return self._database.change(work, now)

    def change_key(self, identity: str, patch: Mapping[str, Any], version: int | None, grant: Grant | None = None) -> KeyChange:
        """Apply a merge patch to a key that has this version; None: any version. ``grant``: of a client that is no administrator."""
        named = self._named()

        def changed(transaction: Transaction, before: StoredKey) -> tuple[Key, str | None]:
            if grant is None:
                return decisions.changed_key(before, patch, named, transaction.teams())
            policy = _policy(transaction, before.key.team, named)
            return self_service.changed_own_key(before, patch, policy, grant, named, transaction.teams())

        return self._change_key(identity, version, changed, grant=grant)

    def rotate_key(
        self, identity: str, overlap: float, version: int | None, repeatable: Repeatable | None = None, grant: Grant | None = None
    ) -> KeyChange:
        """Create another key for an entry. The former ones expire after ``overlap`` seconds."""
        now, secret = datetime.now(UTC), keys.mint(identity)
        try:
            end = now + timedelta(seconds=overlap)
        except OverflowError:
            raise RefusedChangeError(Reason.INVALID, "overlap: the end is after the year 9999") from None

        named = self._named()

        def rotated(transaction: Transaction, before: StoredKey) -> tuple[Key, str | None]:
            if grant is not None:
                self_service.check_policy(before.key.team, _policy(transaction, before.key.team, named), grant)
            return decisions.rotated_key(before, keys.hash_of(secret), end, now), before.name

        return self._change_key(identity, version, rotated, repeatable, secret, grant)

    def revoke_key(self, identity: str, version: int | None, *, revoked: bool, grant: Grant | None = None) -> KeyChange:
        """Revoke all keys of an entry, or restore them."""

        def changed(_: Transaction, before: StoredKey) -> tuple[Key, str | None]:
            if grant is not None and not revoked:
                raise RefusedChangeError(Reason.FORBIDDEN, "only an administrator restores keys")
            return decisions.revoked_key(before, revoked=revoked), before.name

        return self._change_key(identity, version, changed, grant=grant)

    def delete_key(self, identity: str, version: int | None, grant: Grant | None = None) -> StoredKey:
        """Delete a key, and return what it was."""

        def work(transaction: Transaction) -> StoredKey:
            before = stored_key(transaction.row("key", identity))
            if grant is not None:
                grant.check(before)
            check_version(identity, before.version, version)
            transaction.remove("key", identity)
            return before

        return self._database.change(work)

    def import_keys(self, text: str) -> ImportedKeys:
        """Add the keys of another gateway: lines of text, or LiteLLM's list as JSON. All are added, or none."""
        named = self._named()

        def work(transaction: Transaction) -> ImportedKeys:
            teams = transaction.teams()
            listed = _sorted(transaction, text, named, teams)
            entries = {one.entry["id"]: _imported(one, named, teams) for one in listed.fresh}
            added = [stored_key(row) for row in transaction.add_all("key", entries)]
            left_out = (f"{one.position}: left out: {', '.join(one.left_out)}" for one in listed.fresh if one.left_out)
            return ImportedKeys(added, listed.known, (*listed.again, *left_out))

        return self._database.change(work)

    def _change_key(
        self,
        identity: str,
        version: int | None,
        decide: Callable[[Transaction, StoredKey], tuple[Key, str | None]],
        repeatable: Repeatable | None = None,
        secret: str | None = None,
        grant: Grant | None = None,
    ) -> KeyChange:
        def work(transaction: Transaction) -> KeyChange:
            if (earlier := _repeated(transaction, repeatable)) is not None:
                return _earlier(transaction, earlier, grant)
            row = transaction.row("key", identity)
            before = stored_key(row)
            if grant is not None:
                grant.check(before)
            check_version(identity, before.version, version)
            entry = key_json(*decide(transaction, before))
            after = row if entry == row.entry else transaction.replace("key", row, entry)
            _remember(transaction, repeatable, identity)
            return KeyChange(stored_key(after), before, secret)

        return self._database.change(work)

    # Raises

    def change_raises(self, holder: Holder, work: Work) -> RaiseChange:
        """Change the raises of a key or team, also of one in the YAML. Returns those in force before and after.

        Raises the errors of ``work``, and then nothing was changed.
        """
        now = datetime.now(UTC)

        def change(transaction: Transaction) -> RaiseChange:
            stored = transaction.raises(*holder)
            before = tuple(each for each in (() if stored is None else decode(stored)) if each.until > now.timestamp())
            after = work(before)
            last = datetime.fromtimestamp(max((each.until for each in after), default=0.0), UTC)
            transaction.set_raises(*holder, encode(after), last)
            return RaiseChange(before, after)

        return self._database.change(change, now)

    # Teams

    def create_team(self, fields: Mapping[str, Any], repeatable: Repeatable | None = None) -> TeamChange:
        """Create a team."""
        named = self._named()

        def work(transaction: Transaction) -> TeamChange:
            if (earlier := _repeated(transaction, repeatable)) is not None:
                return TeamChange(stored_team(transaction.row("team", earlier)), is_repeated=True)
            team = decisions.new_team(fields, named)
            added = transaction.add("team", team.id, team_json(team))
            _remember(transaction, repeatable, team.id)
            return TeamChange(stored_team(added))

        return self._database.change(work)

    def change_team(self, identity: str, patch: Mapping[str, Any], version: int | None) -> TeamChange:
        """Apply a merge patch to a team that has this version; None: any version."""
        named = self._named()

        def work(transaction: Transaction) -> TeamChange:
            row = transaction.row("team", identity)
            before = stored_team(row)
            check_version(identity, before.version, version)
            entry = team_json(decisions.changed_team(before, patch, named))
            after: Row = row if entry == row.entry else transaction.replace("team", row, entry)
            return TeamChange(stored_team(after), before)

        return self._database.change(work)

    def delete_team(self, identity: str, version: int | None) -> StoredTeam:
        """Delete a team without keys, and return what it was."""

        def work(transaction: Transaction) -> StoredTeam:
            before = stored_team(transaction.row("team", identity))
            check_version(identity, before.version, version)
            if (key := transaction.uses_team(identity)) is not None:
                raise RefusedChangeError(Reason.CONFLICT, f"the key {key} belongs to {identity}; move or delete the keys of a team first")
            transaction.remove("team", identity)
            return before

        return self._database.change(work)


def _sorted(transaction: Transaction, text: str, named: Named, teams: Collection[str]) -> SortedKeys:
    """Return the keys of a file, sorted into new and known ones. Raises RefusedChangeError."""
    try:
        found = without_unknown_teams(read_keys(text), {*named.teams, *teams})
        return sort_keys(found, {*named.hashes, *transaction.known_hashes([one.entry["hash"] for one in found])}, named.keys)
    except BadLineError as error:
        raise RefusedChangeError(Reason.INVALID, str(error)) from None


def _imported(one: ImportedKey, named: Named, teams: Collection[str]) -> str:
    """Return the JSON of a key of a file. Messages name its position."""
    try:
        return key_json(decisions.imported_key(one.entry, named, teams), None)
    except RefusedChangeError as error:
        raise RefusedChangeError(error.reason, f"{one.position}: {error}") from None


def _repeated(transaction: Transaction, repeatable: Repeatable | None) -> str | None:
    return None if repeatable is None else transaction.repeated(repeatable.idempotency_key, repeatable.request)


def _earlier(transaction: Transaction, identity: str, grant: Grant | None = None) -> KeyChange:
    """Return the key that an earlier request has changed, as it is now."""
    stored = stored_key(transaction.row("key", identity))
    if grant is not None:
        grant.check(stored)
    return KeyChange(stored, is_repeated=True)


def _policy(transaction: Transaction, team: str | None, named: Named) -> SelfService | None:
    """Return the policy of a team about the keys that its people create. The YAML decides about a team that it names."""
    if team is None or team in named.teams:
        return named.policies.get(team or "")
    row = transaction.find("team", team)
    return None if row is None else stored_team(row).team.self_service


def _remember(transaction: Transaction, repeatable: Repeatable | None, identity: str) -> None:
    if repeatable is not None:
        transaction.remember(repeatable.idempotency_key, repeatable.request, identity)
