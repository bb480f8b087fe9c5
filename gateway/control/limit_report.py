"""Report the limits of keys and teams to operators: how much is used, what remains, and when all is available again.

The rule: a report reserves nothing and creates nothing. With a shared store it has the counts of the store, as key holders see them. They
are unknown while the store does not respond.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest
from time import monotonic, time
from typing import Any

from gateway.config.problems import did_you_mean
from gateway.control.store_counts import StoreCounts
from gateway.limits.end_users import fixed_holders
from gateway.limits.shared_counts import Buckets
from gateway.limits.states import LimitState, limit_states
from gateway.limits.windows import moment
from gateway.snapshot.snapshot import Allowance, Snapshot
from gateway.usage.errors import QueryError, check_parameters


def limit_report(snapshot: Snapshot, buckets: Buckets, stored: StoreCounts, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the limits as JSON, for an encoder of msgspec: all limits, or the limits of a key or a team.

    Raises QueryError.
    """
    check_parameters(parameters, ("key", "team"))
    states = [state for each in _chosen(snapshot, parameters) for state in _states(snapshot, buckets, stored, each)]
    return {"limits": [state.document() for state in states]}


def closest_limits(
    snapshot: Snapshot, buckets: Buckets, stored: StoreCounts, more: Iterable[Allowance], parameters: Mapping[str, str]
) -> dict[str, Any]:
    """Return the limits of which the largest shares are used, as JSON for an encoder of msgspec. Raises QueryError.

    ``more`` are the limits of keys and teams that are not in the snapshot.
    """
    check_parameters(parameters, ("closest",))
    if not re.fullmatch(r"[0-9]{1,3}", parameters["closest"]):
        raise QueryError("closest: expected a number up to 999")
    allowances = {each.holder: each for some in (*_all_of(snapshot), *more) for each in fixed_holders(some)}
    states = (state for each in allowances.values() for state in _states(snapshot, buckets, stored, each) if state.used)
    return {"limits": [each.document() for each in nlargest(int(parameters["closest"]), states, key=lambda each: each.share)]}


def _all_of(snapshot: Snapshot) -> Iterator[Allowance]:
    yield from (each for key in snapshot.keys for each in key.allowances)
    yield from (each for allowances in snapshot.teams.values() for each in allowances)


def _chosen(snapshot: Snapshot, parameters: Mapping[str, str]) -> list[Allowance]:
    """Return the allowances of a query, each holder once. Raises QueryError for an unknown key or team."""
    by_key = {key.id: key.allowances for key in snapshot.keys}
    by_team = {key.team: [each for each in key.allowances if each.holder.startswith("team ")] for key in snapshot.keys if key.team}
    by_team |= {team: [*allowances] for team, allowances in snapshot.teams.items()}
    chosen: list[Allowance] = []
    for name, known in (("key", by_key), ("team", by_team)):
        wanted = parameters.get(name)
        if wanted is not None and wanted not in known:
            raise QueryError(f"there is no {name} {wanted}{did_you_mean(wanted, known)}")
        if wanted is not None:
            chosen += known[wanted]
        elif not parameters:
            chosen += [each for allowances in known.values() for each in allowances]
    return list({each.holder: each for each in chosen}.values())


def _states(snapshot: Snapshot, buckets: Buckets, stored: StoreCounts, allowance: Allowance) -> Iterator[LimitState]:
    name, now = allowance.holder, monotonic()
    if allowance.users is not None:
        return limit_states(allowance, None, None, now)  # of each end user, so nothing is used of them as a whole
    if snapshot.uses_store:
        known = stored.known.get(name)
        return limit_states(allowance, known and known.rates, known and known.budgets, now)
    return limit_states(allowance, buckets.shown_rates(name), buckets.shown_states(name, allowance.limits, moment(now, time())), now)
