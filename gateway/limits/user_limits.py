"""The limits of the end users of keys in one worker: which holders count a request of an end user.

The rules: end users are counted in tables of bounded size (see ``user_table``). At the bound, further end users share one holder, which has
the limits of one end user. The limits remembered here are bounded too, and can be found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from time import monotonic, time

from gateway.api.errors import Refusal
from gateway.limits import end_users
from gateway.limits.decision import Holder
from gateway.limits.end_users import EndUser
from gateway.limits.key_limits import PART_FOR_SUBJECTS, KeyLimits
from gateway.limits.shared_counts import Buckets, BucketsFullError
from gateway.limits.user_table import UserTable
from gateway.limits.windows import moment
from gateway.snapshot.snapshot import Allowance, Key, PerUser
from gateway.telemetry.metrics import WorkerMetrics

NO_USER = "end_user"
"""The reason of a refusal for a request without an end user."""
_MOST_KNOWN = 4096
"""End users whose limits a worker remembers."""
_MOST_TABLES = 1000
"""Tables of end users that a worker remembers, those of removed keys among them."""


def counts_users(key: Key) -> bool:
    """Return whether a key or its team has limits of end users."""
    return any(each.users is not None for each in key.allowances)


class UserLimits:
    """The limits of end users."""

    def __init__(self, buckets: Buckets, metrics: WorkerMetrics) -> None:
        self._buckets = buckets
        self._metrics = metrics
        self._tables: dict[str, UserTable] = {}
        self._known: dict[tuple[str | bool | None, ...], KeyLimits] = {}
        self._entries: Mapping[str, Key] = {}

    def apply_keys(self, keys: Iterable[Key]) -> None:
        """Use the limits of these configured keys for new requests. Usage so far stays counted."""
        self._entries = {key.id: key for key in keys if counts_users(key)}
        self.forget()
        for key in self._entries.values():
            for each in key.allowances:
                if each.users is not None:
                    self._metrics.cells("limited_users_overflow_total", end_users.owner_of(each.holder))

    def forget(self) -> None:
        """Forget the limits of end users, because those of keys may have changed. A table is used as long as its limits stay the same."""
        self._known.clear()
        if len(self._tables) > _MOST_TABLES:
            self._tables.clear()

    def on_arrival(self, key: Key, headers: Mapping[bytes, bytes]) -> KeyLimits:
        """Return the limits of a request as far as its headers name the end user. Raises Refusal."""
        return self.limits_of(end_users.on_arrival(key, headers))

    def with_body(self, limits: KeyLimits, field: object) -> KeyLimits:
        """Return the limits of a request whose body has been read. ``field``: its field ``user``. Raises Refusal."""
        assert limits.end_user is not None
        return self.limits_of(end_users.named_by_body(limits.end_user.key, field))

    def found_again(self, limits: KeyLimits) -> KeyLimits:
        """Return the limits of the same end user again, because its former counts now belong to another end user."""
        user = limits.end_user
        assert user is not None
        self._known.pop(_identity(user), None)
        return self.limits_of(user)

    def shown(self, key: Key, headers: Mapping[bytes, bytes], named: str | None) -> KeyLimits:
        """Return the limits of an end user for a report. ``named``: the end user of a key whose requests name it in the body."""
        user = end_users.on_arrival(key, headers)
        user = end_users.named_by_body(key, named) if user.is_awaited else user
        self._known.pop(_identity(user), None)  # its counts may belong to another one now
        return self.limits_of(user, is_shown=True)

    def limits_of(self, user: EndUser, *, is_shown: bool = False) -> KeyLimits:
        """Return the limits of an end user. ``is_shown``: they are for a report, and no request is refused. Raises Refusal."""
        if (known := self._known.get(_identity(user))) is not None:
            return known
        try:
            return self._made(user, is_shown)
        except BucketsFullError:
            pass
        key = user.key
        if key.entry is not None and key.entry in self._entries:  # a subject without memory for its own limits has those of its entry
            return self.limits_of(user._replace(key=replace(self._entries[key.entry], user_header=None)), is_shown=is_shown)
        raise Refusal("overloaded", "The limits of this key can't be counted at the moment.")

    def _made(self, user: EndUser, is_shown: bool) -> KeyLimits:
        """Make the limits of an end user. Raises Refusal and BucketsFullError.

        End users that share counts at the bound share these limits too. Each request looks for free counts before.
        """
        key, allowances, holders = user.key, list[Allowance](), dict[str, Holder]()
        identity = _identity(user)
        for each in key.allowances:
            if each.users is None:
                allowances.append(each)
            elif user.name is not None:
                if (holder := self._placed(each, user.name)) is not None:
                    holders[holder.name] = holder
                else:
                    owner = end_users.owner_of(each.holder)
                    identity = (*identity[:2], end_users.other_users(owner))
                    if not is_shown:
                        self._metrics.cells("limited_users_overflow_total", owner)[0] += 1
                allowances.append(replace(each, holder=end_users.other_users(owner) if holder is None else holder.name, users=None))
            elif not user.is_awaited:
                allowances += self._without_user(user, each, each.users, is_shown)
        is_shared = identity != _identity(user)
        if is_shared and not holders and (known := self._known.get(identity)) is not None:
            return known
        part = 1.0 if key.entry is None else PART_FOR_SUBJECTS
        made = KeyLimits(key.entry or key.id, self._buckets, tuple(allowances), part, user, holders)
        if not (is_shared and holders):
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[identity] = made
        return made

    def _placed(self, allowance: Allowance, name: str) -> Holder | None:
        """Return the holder of an end user; None at the bound."""
        table = self._tables.get(allowance.holder)
        if table is None or table.allowance != allowance:
            try:
                table = self._tables[allowance.holder] = UserTable(self._buckets, allowance, PART_FOR_SUBJECTS)
            except BucketsFullError:
                return None
        return table.allocate(name, moment(monotonic(), time()))

    def _without_user(self, user: EndUser, allowance: Allowance, users: PerUser, is_shown: bool) -> list[Allowance]:
        """Return the allowance of a request without an end user, if it is limited. Raises Refusal."""
        if users.missing == "unlimited":
            return []
        if users.missing == "refused" and not is_shown:
            self._metrics.cells("limited_total", user.key.entry or user.key.id, NO_USER)[0] += 1
            raise _refusal(user)
        return [replace(allowance, holder=end_users.without_user(end_users.owner_of(allowance.holder)), users=None)]


def _identity(user: EndUser) -> tuple[str | bool | None, ...]:
    return user.key.id, user.key.team, user.name, user.is_awaited


def _refusal(user: EndUser) -> Refusal:
    """Return the error for a request without an end user."""
    if (header := user.key.user_header) is not None:
        named = header.decode()
        return Refusal("missing_required_parameter", f"The header '{named}' must name the end user.", param=named)
    if user.is_of_body:
        return Refusal("missing_required_parameter", "The field 'user' must name the end user.", param="user")
    return Refusal("missing_required_parameter", "A request without a key names no end user.")
