"""Assign what the ledger recorded before a start to the holders of limits, so that budgets survive a restart. Pure.

The rule: a row counts for the holders that a request of its key, team and model counts for now. A model's other names are those
of the present configuration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from gateway.limits.rules import PeriodUse
from gateway.limits.windows import period_starts
from gateway.snapshot.snapshot import Allowance, Model, Snapshot


class UsedSince(NamedTuple):
    """Sums of ledger rows with the same key, team and model: tokens, and cost in nano-units.

    ``slot`` is the number of the last period start that is not after these rows.
    """

    key: str
    team: str | None
    model: str | None
    slot: int
    tokens: int
    cost: int


class HolderUse(NamedTuple):
    """The use of a holder. ``entry`` is the configured entry of a token's subject; None for other holders."""

    allowance: Allowance
    used: PeriodUse
    entry: Allowance | None = None


class Budgets:
    """The holders of a snapshot with limits for a day or a month, by key and team.

    ``keys`` and ``teams`` are their IDs; ``entries`` are the keys as which tokens may count.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._models: Mapping[str, Model] = {model.id: model for model in snapshot.models}
        self._configured = frozenset(key.id for key in snapshot.keys)
        of_tokens = {entry for issuer in snapshot.issuers for entry in issuer.keys}
        by_key, by_team = {}, {team: _with_budget(allowances) for team, allowances in snapshot.teams.items()}
        for key in snapshot.keys:
            own = [each for each in key.allowances if each.holder.startswith("key ")]
            by_key[key.id] = _with_budget(own)
            if key.team is not None:
                by_team[key.team] = _with_budget(each for each in key.allowances if each not in own)
        self._by_key: Mapping[str, Sequence[Allowance]] = MappingProxyType({key: found for key, found in by_key.items() if found})
        self._by_team: Mapping[str, Sequence[Allowance]] = MappingProxyType({team: found for team, found in by_team.items() if found})
        self.keys, self.teams = frozenset(self._by_key), frozenset(self._by_team)
        self.entries = self.keys & of_tokens

    def __bool__(self) -> bool:
        return bool(self._by_key or self._by_team)

    def period_starts(self, day: int) -> tuple[int, ...]:
        """Return when the periods of these limits start, in seconds since the epoch, the earliest first."""
        of_day, of_month = period_starts(day)
        limits = [each.limits for allowances in (*self._by_key.values(), *self._by_team.values()) for each in allowances]
        monthly = any(each.tokens_per_month is not None or each.cost_per_month is not None for each in limits)
        return tuple(sorted({of_day, of_month} if monthly else {of_day}))

    def use_by_holder(self, rows: Iterable[UsedSince], starts: Sequence[int], day: int) -> dict[str, HolderUse]:
        """Return what each holder had used, by its name. ``starts`` is what ``period_starts`` returned for this day."""
        today = starts.index(period_starts(day)[0])
        found: dict[str, HolderUse] = {}
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for row in rows:
            for each in self._holders(row):
                name = each.allowance.holder
                found[name] = each
                total = sums[name]
                total[2] += row.tokens
                total[3] += row.cost
                if row.slot >= today:
                    total[0] += row.tokens
                    total[1] += row.cost
        return {name: each._replace(used=PeriodUse(*sums[name])) for name, each in found.items()}

    def _holders(self, row: UsedSince) -> Iterator[HolderUse]:
        for each, entry in self._of_key(row.key):
            if self._covers(each, row.model):
                yield HolderUse(each, PeriodUse(), entry)
        for each in self._by_team.get(row.team or "", ()):
            if self._covers(each, row.model):
                yield HolderUse(each, PeriodUse())

    def _of_key(self, key: str) -> Iterator[tuple[Allowance, Allowance | None]]:
        """Yield the key's own allowances; those of a token's subject with the allowance of its entry."""
        if key in self._configured:
            yield from ((each, None) for each in self._by_key.get(key, ()))
            return
        entry = max((entry for entry in self.entries if key.startswith(f"{entry}/")), key=len, default=None)
        if entry is not None:
            own = f"key {entry}"
            yield from ((replace(each, holder=f"key {key}{each.holder[len(own) :]}"), each) for each in self._by_key[entry])

    def _covers(self, allowance: Allowance, model: str | None) -> bool:
        if allowance.models is None:
            return True
        if model is None:
            return False
        known = self._models.get(model) or Model(model, ())
        return known.is_in(allowance.models)


def _with_budget(allowances: Iterable[Allowance]) -> list[Allowance]:
    return [each for each in allowances if each.limits.calendar]
