"""Reserve what one request may use of its key's limits, and settle it when the request is finished.

The rules: amounts that follow from the headers are reserved before the body is read, the other amounts when the model and the size are
known. Every reservation, in this gateway's memory or in the store, is settled once, before the client gets the end of its response. So
sequential requests of a client never block each other, whichever worker gets the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from itertools import repeat
from time import monotonic, time

import msgspec

from gateway.api.errors import Refusal
from gateway.api.settlement import Settlement
from gateway.api.usage import Usage
from gateway.limits.decision import Amounts, Holder
from gateway.limits.estimate import TokenEstimate, counts_as_request, reserved_amounts, used_amounts
from gateway.limits.headers import Layout
from gateway.limits.key_limits import ARRIVAL, KeyLimits
from gateway.limits.lease import Lease
from gateway.limits.limiter import Limiter
from gateway.limits.redis.leases import LeasedHolders
from gateway.limits.redis.store import StoreUnavailableError
from gateway.limits.refusals import refusal
from gateway.limits.shared_counts import CountsMovedError
from gateway.limits.states import StoreResult
from gateway.limits.user_table import note_store_use
from gateway.limits.windows import ExceededLimit, Moment, moment
from gateway.snapshot.snapshot import Key, Model

_NOTHING, _UNWEIGHED, _NO_TOKENS = Amounts(), TokenEstimate(), Usage()


class Reservation(msgspec.Struct, eq=False):
    """The reservation of one request of a key with limits. It counts for the day on which the request arrived.

    ``fields``: the headers of the request. ``model`` and ``estimated``: set by ``expected_use``, before the tokens are reserved.
    """

    limiter: Limiter
    limits: KeyLimits
    _request_id: str
    fields: Mapping[bytes, bytes]
    arrived: Moment
    shown_holders: Sequence[Holder]
    layout: Layout | None
    model: Model | None = None
    estimated: TokenEstimate = _UNWEIGHED
    has_reserved_tokens: bool = False
    _reserved: Sequence[tuple[Holder, Amounts]] = ()
    _bucket_ends: dict[int, float] = {}
    result: StoreResult | None = None
    lease: Lease | None = None
    sessions: Sequence[Holder] = ()
    nearest_limit: str | None = None
    """The budget that is used the most, if the response warns about one."""

    def reserve_request(self) -> Awaitable[None] | None:
        """Reserve a request and a concurrent slot before the body is read. Raises Refusal.

        Returns what is left to be awaited, None in memory: a coroutine costs as much as the reservation.
        """
        limits, store = self.limits, self.limiter.store
        if store is None:
            self._reserve_in_memory(limits.on_arrival, self.arrived)
        elif limits.is_known_on_arrival:
            return self._reserve_from_lease(limits.on_arrival, limits.leased(store, None))
        else:
            self._apply_result(store.cached_refusal(limits.for_all_models, monotonic()))
        return None

    def add_user(self, field: object) -> None:
        """Count the request for the end user that its body names, from here on. ``field``: its field ``user``. Raises Refusal.

        The request itself is reserved from the end user's limits here, as it was from the other limits on arrival.
        """
        before, reserved = self.limits, self._reserved
        self.limits = self.limiter.end_users.with_body(before, field)
        self.shown_holders, self.layout = self.limits.for_all_models, self.limits.layout
        if self.limiter.store is None and (reserved or not before.on_arrival):
            known = {holder.name for holder, _ in reserved}
            self._reserve_in_memory([(holder, ARRIVAL) for holder in self.limits.for_all_models if holder.name not in known], self._now())
            self._reserved = (*reserved, *self._reserved)

    def _found_again(self, wanted: Sequence[tuple[Holder, Amounts]]) -> Sequence[tuple[Holder, Amounts]]:
        """Find the counts of the end user again, which belong to another one now. Returns the same amounts from the holders found."""
        before, self.limits = self.limits, self.limiter.end_users.found_again(self.limits)
        found = {old.name: new for (_, old), (_, new) in zip(before.holders, self.limits.holders, strict=True)}
        self.layout, self.shown_holders = None, [found.get(each.name, each) for each in self.shown_holders]
        return [(found.get(holder.name, holder), amounts) for holder, amounts in wanted]

    def holders(self, model: Model) -> Sequence[Holder]:
        """Return all holders that count the request for a model, its sessions included."""
        return (*self.limits.for_model(model)[1], *self.sessions)

    def reserve_tokens(self) -> Awaitable[None] | None:
        """Reserve the tokens, and the amounts for the model's own limits. Called again for each fallback model. Raises Refusal.

        Returns what is left to be awaited, as ``reserve_request`` does.
        """
        limits, model = self.limits, self.model
        assert model is not None
        if limits.is_known_on_arrival:
            return None
        for_model, holders, layout = limits.for_model(model)
        if self.sessions:
            layout = None
            for_model, holders = (*for_model, *self.sessions), (*holders, *self.sessions)
        all_amounts = reserved_amounts(self.estimated, model.price)
        if self.has_reserved_tokens:
            return self._change_model(for_model, holders, all_amounts)
        self.has_reserved_tokens = True
        reserved = list(zip(holders, repeat(all_amounts)))
        store = self.limiter.store
        if store is not None and not self._reserved:
            return self._reserve_from_lease(reserved, None if self.sessions else limits.leased(store, model))
        self.shown_holders, self.layout, tokens = holders, layout, Amounts(0, 0, all_amounts.tokens, all_amounts.cost)
        if self._reserved:
            more = list(zip(limits.counting_tokens, repeat(tokens)))
            if for_model:
                more += zip(for_model, repeat(all_amounts))
            self._reserve_in_memory(more, self._now())
            self._reserved = reserved
        else:
            self._reserve_in_memory(reserved, self._now())  # nothing was on arrival: all limits are for models, or there was a store
        return None

    async def _change_model(self, for_model: Sequence[Holder], remaining: Sequence[Holder], all_amounts: Amounts) -> None:
        """Release what only the previous model counted, and reserve what this model counts."""
        lease, self.lease = self.lease, None
        if lease is not None and self.limiter.store is not None:
            self.limiter.store.leases.end(lease)  # from here on the request has a separate reservation
        released = [(holder, amounts) for holder, amounts in self._reserved if holder not in remaining]
        retained = self._reserved = [(holder, amounts) for holder, amounts in self._reserved if holder in remaining]
        self._settle(released, _NOTHING)
        already = {holder for holder, _ in retained}
        wanted = [(holder, all_amounts) for holder in for_model if holder not in already]
        if self.result is None:
            self.shown_holders, self.layout = remaining, None
            self._reserve_in_memory(wanted, self._now())
            self._reserved = [*retained, *wanted]
        else:
            await self._reserve_in_store(wanted)

    def _now(self) -> Moment:
        """Return the current time, but the day on which the request arrived."""
        then = self.arrived
        return Moment(monotonic(), then.wall, then.periods, then.period_ends)

    def _reserve_in_memory(self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment) -> None:
        """Reserve in this gateway's memory. Raises Refusal."""
        try:
            exceeded = self.limits.counts.reserve(wanted, at, self._bucket_ends)
        except CountsMovedError:
            self._reserve_in_memory(self._found_again(wanted), at)
            return
        if exceeded is not None:
            raise self._refusal(*exceeded)
        self._reserved = wanted

    def _reserve_from_lease(self, wanted: Sequence[tuple[Holder, Amounts]], leased: LeasedHolders | None) -> Awaitable[None] | None:
        """Reserve from the lease of the holders and return None, or return what is left to be awaited."""
        if leased is not None and (lease := leased.admit(self._request_id, wanted[0][1], monotonic())) is not None:
            self.lease, self.result, self._reserved = lease, lease.known, wanted
            self.limiter.count_admission("lease")
            return None
        return self._reserve_in_store(wanted, leased)

    async def _reserve_in_store(self, wanted: Sequence[tuple[Holder, Amounts]], leased: LeasedHolders | None = None) -> None:
        """Reserve in the store; in memory if the store is unavailable and the configuration allows it. Raises Refusal."""
        store = self.limiter.store
        if not wanted or store is None:  # a reload has removed the store
            return
        try:
            result = await store.admit(self._request_id, wanted)
        except StoreUnavailableError:
            if store.settings.refuses:
                self.limiter.count_refusal(self.limits.key, "store")
                raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
            if self.result is None:  # otherwise the rest is settled in the store
                self.shown_holders, self.layout = tuple(holder for holder, _ in wanted), None
                self._reserve_in_memory(wanted, self._now())
            return
        before = self.result
        if before is not None and self._reserved:
            result = result._replace(full_times=(*before.full_times, *result.full_times), budgets=(*before.budgets, *result.budgets))
        self.limiter.count_evictions(self.limits.key, result.evicted)
        self._apply_result(result)
        if self.limits.end_user is not None:
            note_store_use(self.limiter.buckets, (holder for holder, _ in wanted), result)
        self._reserved = (*self._reserved, *wanted)
        self.limiter.count_admission("call")
        if leased is not None:
            leased.count_call(wanted[0][1], result, monotonic())

    def _apply_result(self, result: StoreResult | None) -> None:
        """Store the result of the store. Raises Refusal."""
        self.result = result
        if result is not None:
            self.limiter.note_budgets(result.budgets)
        if result is not None and result.exceeded is not None:
            raise self._refusal(*result.exceeded)

    def _refusal(self, holder: Holder, exceeded: ExceededLimit) -> Refusal:
        self.limiter.count_refusal(self.limits.key, exceeded.reason)
        return refusal(holder.name, exceeded, self.estimated, None if self.model is None else self.model.price)

    # Settlement

    @property
    def is_unsettled(self) -> bool:
        """Whether something is still reserved."""
        return bool(self._reserved)

    @property
    def counts_tokens(self) -> bool:
        """Whether a limit on tokens or cost counts the request."""
        return not self.limits.is_known_on_arrival

    @property
    def estimated_prompt(self) -> int | None:
        """The estimated tokens of the prompt; None if no limit counts tokens."""
        return self.estimated.prompt if self.counts_tokens else None

    def settle(self, settlement: Settlement, status: int) -> None:
        """Replace what was reserved by what the request has used. ``status``: the HTTP status sent. A second call does nothing."""
        reserved, self._reserved = self._reserved, ()
        if not reserved:
            return
        price = None if self.model is None else self.model.price
        used = used_amounts(settlement.usage or _NO_TOKENS, price, counts_as_request(status))
        self._settle(reserved, used)

    def _settle(self, reserved: Sequence[tuple[Holder, Amounts]], used: Amounts) -> None:
        if self.result is None:
            self.limiter.buckets.settle(reserved, self._bucket_ends, used, self.arrived, monotonic())
        elif self.lease is not None and self.lease.settle(self._request_id, used):
            if self.lease.is_overdrawn and self.limiter.store is not None:
                self.limiter.store.leases.end(self.lease)  # what it lacks is charged now
        elif reserved and self.limiter.store is not None:
            self.limiter.store.settle(self._request_id, reserved, used)


def reservation_of(limiter: Limiter, key: Key, request_id: str, fields: Mapping[bytes, bytes]) -> Reservation:
    """Return the reservation for a request of a key with limits. ``fields``: the headers of the request. Raises Refusal."""
    limits = limiter.limits_of(key, fields)
    return Reservation(limiter, limits, request_id, fields, moment(monotonic(), time()), limits.for_all_models, limits.layout)
