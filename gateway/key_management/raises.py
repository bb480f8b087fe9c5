"""Temporary raises of limits: their requests, their stored form, and the limits with raises in force. Pure.

The rules: a raise ends at a time that is stored with it. It never lowers a limit: a higher configured limit applies as it is. A limit has
one raise at a time, and a new one replaces it. Only limits of a whole key or team are raised: not those of single
models or of a session, and no soft budgets, which only warn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec

from gateway.config.problems import did_you_mean
from gateway.config.quantities import parse_duration
from gateway.key_management.key_list import instant_of
from gateway.snapshot.money import MAX_COST_LIMIT, NANO, json_number, nano_units
from gateway.snapshot.snapshot import Allowance, Limits, Raised

_LONGEST = timedelta(days=366)
_FACTOR = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)x")
_AMOUNT = re.compile(r"[0-9]{1,18}(\.[0-9]{1,9})?")
_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
_MOST = {False: 2**63 - 1, True: MAX_COST_LIMIT * NANO}
_SINGLE = tuple(each.name for each in fields(Limits) if each.type == "int | None")
"""The limits with one amount. Rolling budgets have the names of their refusals, for example ``tokens_per_7d``."""


@dataclass(frozen=True, slots=True)
class Raise:
    """A raise of a limit, by a factor (as text, which is exact) or to an amount.

    A cost is in nano-units, times are in seconds since the epoch.
    """

    limit: str
    until: float
    created: float
    by: str
    factor: str | None = None
    amount: int | None = None

    @property
    def is_cost(self) -> bool:
        """Whether the limit is on cost."""
        return self.limit.startswith("cost_")

    def raised(self, configured: int) -> int:
        """Return the raised amount of a limit."""
        wanted = self.amount if self.factor is None else int(configured * Fraction(self.factor))
        return max(configured, min(wanted or 0, _MOST[self.is_cost]))

    def document(self) -> dict[str, Any]:
        """Return it as JSON, for an encoder of msgspec."""
        amount = json_number(self.amount) if self.is_cost and self.amount is not None else self.amount
        to = f"{self.factor}x" if amount is None else amount
        return {"limit": self.limit, "to": to, "until": instant_of(self.until), "created": instant_of(self.created), "by": self.by}


class RaiseChange(NamedTuple):
    """The raises of a holder before and after a change."""

    before: tuple[Raise, ...]
    after: tuple[Raise, ...]


Work = Callable[[tuple[Raise, ...]], tuple[Raise, ...]]
"""Returns the raises of a holder after a change. It may be called again, and raises an error to change nothing."""


def new_raise(sent: Mapping[str, Any], allowance: Allowance, now: datetime, by: str) -> Raise:
    """Return the raise that the fields of a request describe. Raises ValueError with a message for the operator.

    ``allowance`` has the limits of the holder in force, ``now`` is aware, and ``by`` is the actor.
    """
    if unknown := sent.keys() - {"limit", "to", "until"}:
        raise ValueError(f"there is no field {min(unknown)}; the fields are limit, to and until")
    limit, configured = sent.get("limit"), dict(configured_amounts(allowance.limits))
    if not isinstance(limit, str) or limit not in configured:
        known = did_you_mean(str(limit), configured) or (f"; the limits are {', '.join(configured)}" if configured else "")
        raise ValueError(f"limit: {allowance.holder} has no such limit{known}")
    factor, amount = _parse_size(sent.get("to"), is_cost=limit.startswith("cost_"))
    made = Raise(limit, parse_until(sent.get("until"), now).timestamp(), now.timestamp(), by, factor, amount)
    if made.raised(configured[limit]) <= configured[limit]:
        raise ValueError("to: expected more than the configured limit")
    return made


def _parse_size(value: object, *, is_cost: bool) -> tuple[str | None, int | None]:
    """Return the factor or the amount of a raise. Raises ValueError."""
    text = str(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    if found := _FACTOR.fullmatch(text):
        return found[1], None
    if not _AMOUNT.fullmatch(text) or ("." in text and not is_cost):
        raise ValueError("to: expected a factor such as 2x or 1.5x, or an amount")
    try:
        return None, nano_units(float(text)) if is_cost else int(text)
    except ValueError as error:
        raise ValueError(f"to: {error}") from None


def parse_until(value: object, now: datetime) -> datetime:
    """Return the end of a raise: the next ``18:00`` of UTC, a time such as ``2027-01-31T18:00:00Z``, or a duration such as ``2h``.

    ``now`` is aware. Raises ValueError with a message for the operator.
    """
    text = value if isinstance(value, str) else ""
    try:
        end = _end(text, now.astimezone(UTC))
    except (ValueError, OverflowError):
        raise ValueError("until: expected a time of day in UTC such as 18:00, a time such as 2027-01-31T18:00:00Z, or 2h") from None
    if not now < end <= now + _LONGEST:
        raise ValueError(f"until: expected a time in the future, within {_LONGEST.days} days")
    return end


def _end(text: str, now: datetime) -> datetime:
    if found := _TIME_OF_DAY.fullmatch(text):
        today = now.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
        return today if today > now else today + timedelta(days=1)
    if "-" not in text:
        return now + timedelta(seconds=parse_duration(text))
    end = datetime.fromisoformat(text)
    return (end if end.tzinfo else end.replace(tzinfo=UTC)).astimezone(UTC)


# Limits


def configured_amounts(limits: Limits) -> Iterator[tuple[str, int]]:
    """Yield each limit that can be raised with its configured amount."""
    before = {each.limit: each.configured for each in limits.raised}
    for name in _SINGLE:
        if (value := getattr(limits, name)) is not None:
            yield name, before.get(name, value)
    for budget in limits.budgets:
        for kind in ("tokens", "cost"):
            name, value = f"{kind}_per_{budget.window}", getattr(budget, kind)
            if value is not None and not budget.soft and budget.seconds:
                yield name, before.get(name, value)


def with_raises(allowance: Allowance, raises: Iterable[Raise]) -> Allowance:
    """Return the configured limits of a holder with raises in force. A raise of a limit that does not exist any more has no effect."""
    limits = allowance.limits
    configured, raised = dict(configured_amounts(limits)), []
    for each in raises:
        before = configured.get(each.limit)
        if before is None or each.raised(before) <= before:
            continue
        limits = _with(limits, each.limit, each.raised(before))
        raised.append(Raised(each.limit, before, each.until))
    return replace(allowance, limits=replace(limits, raised=tuple(raised))) if raised else allowance


def _with(limits: Limits, name: str, amount: int) -> Limits:
    kind, _, window = name.partition("_per_")
    changed: dict[str, Any] = {name if name in _SINGLE else kind: amount}
    if name in _SINGLE:
        return replace(limits, **changed)
    budgets = (replace(each, **changed) if each.window == window and not each.soft else each for each in limits.budgets)
    return replace(limits, budgets=tuple(budgets))


# The stored form


def encode(raises: Sequence[Raise]) -> str:
    """Return raises as JSON."""
    return msgspec.json.encode(list(raises)).decode()


def decode(text: str) -> tuple[Raise, ...]:
    """Return raises from JSON. Raises ValueError."""
    try:
        return _DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError("the stored raises are invalid") from error


_DECODER = msgspec.json.Decoder(tuple[Raise, ...])
