"""Count the end users of one key or team in memory of bounded size, which all workers share.

The rules: an end user with use in any window, with requests in flight, or with use in the limits store is never evicted. At the bound, a
new end user gets the counts of one without use, or none. The lock of the memory is held when counts are given to an end user, and again
when a request reserves from them (``shared_counts.UserCounts``): a worker may remember counts that another worker has given away.

The memory has a record for the table and one for each end user, which is added when it is needed. The record of an end user is that of a
holder (see ``shared_counts``), and more cells: the number of the end user, until when the limits store may count for it, by the monotonic
clock, and its name, for observers. Its rolling windows have records too, each with one more cell: the number of the end user whose use it
has. The record of the table has the count of end users, the next one to examine for use, and a log of the last changes, so that each worker
finds end users by a dictionary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from time import monotonic
from typing import NamedTuple

from msgspec import structs

from gateway.limits import windows
from gateway.limits.decision import REQUESTS, SIZE, TOKENS, Holder
from gateway.limits.end_users import LONGEST_NAME, owner_of, user_of
from gateway.limits.shared_counts import Buckets, BucketsFullError
from gateway.limits.states import StoreResult
from gateway.limits.windows import RING_CELLS, BudgetState, Moment
from gateway.snapshot.snapshot import Allowance
from upstream.cells import Cells

_COUNT, _NEXT, _CHANGES, _LOG = 0, 1, 2, 3
_LOGGED = 1024
"""Changes in the log. A worker that has missed more reads the records."""
_EXAMINED = 32
"""End users that are examined for use at the bound, before a new one gets no counts. The next search continues there."""
_HELD = 1.0
"""Seconds for which a new end user keeps its counts without a request."""
_STORE_USE = 120.0
"""Seconds for which use in the limits store counts at least: that of a minute, and of a lease that began meanwhile."""


_NAME = LONGEST_NAME // 8
"""Cells of a name, which is ASCII, with zeros after it."""


class UserTable:
    """The end users of an allowance, as one process sees them. ``part``: of the memory. Raises BucketsFullError if no memory is free."""

    def __init__(self, buckets: Buckets, allowance: Allowance, part: float) -> None:
        assert allowance.users is not None
        self.allowance = allowance
        self._buckets = buckets
        self._owner = owner_of(allowance.holder)
        self._limits = allowance.limits
        self._most = allowance.users.max_users
        self._part = part
        with buckets.exclusive():
            self._table = buckets.record(_table(allowance.holder), _LOG + _LOGGED, part)
        self._by_number: dict[float, int] = {}
        self._numbers: list[float] = []
        self._placed: dict[int, Holder] = {}
        self._seen = 0

    def allocate(self, name: str, at: Moment) -> Holder | None:
        """Return the holder of an end user by its name. None: the table is full, and each examined end user has use."""
        number, cells = _number_of(self._owner, name), self._buckets.cells
        with self._buckets.exclusive():
            self._follow()
            if (index := self._by_number.get(number)) is None:
                if (index := self._free(at)) is None:
                    return None
                self._assign(index, number, name)
            holder = structs.replace(self._holder(index), name=user_of(self._owner, name), number=number)
            for window in holder.windows:
                if window.slice_seconds and cells[window.start + RING_CELLS] != number:
                    _clear(cells, window.start, RING_CELLS)
                    cells[window.start + RING_CELLS] = number
            held = self._buckets.number_cell(holder) + 1
            cells[held] = max(cells[held], at.now + _HELD)
        return holder

    def _follow(self) -> None:
        """Learn what other workers have changed."""
        cells, table = self._buckets.cells, self._table
        changes, count = int(cells[table + _CHANGES]), int(cells[table + _COUNT])
        self._numbers += [0.0] * (count - len(self._numbers))
        if changes - self._seen > _LOGGED:
            for index in range(count):
                self._note(index)
        else:
            for change in range(self._seen, changes):
                self._note(int(cells[table + _LOG + change % _LOGGED]))
        self._seen = changes

    def _note(self, index: int) -> None:
        before, number = self._numbers[index], self._buckets.cells[self._offset(index) + SIZE + self._buckets.workers]
        if self._by_number.get(before) == index:
            del self._by_number[before]
        self._numbers[index], self._by_number[number] = number, index

    def _free(self, at: Moment) -> int | None:
        """Return the index of counts that are free, None without any."""
        cells, table = self._buckets.cells, self._table
        count = int(cells[table + _COUNT])
        if count < self._most:
            try:
                self._holder(count)
            except BucketsFullError:
                pass  # the memory is the bound
            else:
                cells[table + _COUNT] = count + 1
                self._numbers.append(0.0)
                return count
        most = min(count, self._most)
        for _ in range(min(_EXAMINED, most)):
            index = int(cells[table + _NEXT]) % most
            cells[table + _NEXT] = index + 1
            if not self._is_used(self._holder(index), at):
                return index
        return None

    def _assign(self, index: int, number: float, name: str) -> None:
        """Give counts to an end user without use."""
        cells, table, offset = self._buckets.cells, self._table, self._holder(index).offset
        _clear(cells, offset, SIZE)
        cells[self._buckets.number_cell(self._holder(index))] = number
        cells[self._buckets.number_cell(self._holder(index)) + 1] = 0.0
        first = self._buckets.number_cell(self._holder(index)) + 2
        cells[first : first + _NAME] = array("d", name.encode().ljust(8 * _NAME, b"\0"))
        changes = int(cells[table + _CHANGES])
        cells[table + _LOG + changes % _LOGGED], cells[table + _CHANGES] = index, changes + 1
        self._note(index)
        self._seen = changes + 1

    def _is_used(self, holder: Holder, at: Moment) -> bool:
        """Return whether an end user has use that counts, has requests in flight, or may have use in the limits store."""
        cells, offset, number = self._buckets.cells, holder.offset, self._buckets.number_cell(holder)
        if cells[offset + REQUESTS] > at.now or cells[offset + TOKENS] > at.now or cells[number + 1] > at.now:
            return True
        if self._buckets.in_flight(holder) > 0:
            return True
        counted = (each for each in holder.windows if not each.slice_seconds or cells[each.start + RING_CELLS] == cells[number])
        return any(any(windows.used_in(each, cells, at)) for each in counted)

    def _holder(self, index: int) -> Holder:
        """Return the holder in a record, without the end user's name. Raises BucketsFullError if it is new and has no memory."""
        if (found := self._placed.get(index)) is None:
            name, offset = self._record(index), self._offset(index)
            rings = {
                each.window: self._buckets.record(f"{name}\n{each.window}", RING_CELLS + 1, self._part)
                for each in self._limits.budgets
                if each.seconds
            }
            found = self._placed[index] = Holder.placed(name, self._limits, offset, rings)
        return found

    def _offset(self, index: int) -> int:
        """Return the offset of a record of an end user. Raises BucketsFullError if it is new and has no memory."""
        return self._buckets.record(self._record(index), SIZE + self._buckets.workers + 2 + _NAME, self._part, is_holder=True)

    def _record(self, index: int) -> str:
        return _record(self._owner, index)


def note_store_use(buckets: Buckets, holders: Iterable[Holder], result: StoreResult) -> None:
    """Note until when the limits store counts what end users have used, by the monotonic clock."""
    now = monotonic()
    until = max([_STORE_USE, *(state.reset for _, state in result.budgets)]) + now
    until = max([until, *(max(full) for _, *full in result.full_times)])
    with buckets.exclusive():
        for holder in holders:
            number = buckets.number_cell(holder)
            if holder.number and buckets.cells[number] == holder.number:
                buckets.cells[number + 1] = max(buckets.cells[number + 1], until)


def users_held(buckets: Buckets, holders: Iterable[str]) -> dict[str, int]:
    """Return how many end users have their own counts, by key or team, for an observer. ``holders``: those of the limits of end users."""
    return {owner_of(name): int(buckets.shown_cell(_table(name), _COUNT)) for name in holders}


class ShownUser(NamedTuple):
    """An end user for an observer: its limits, with its own holder, its use here, and until when the limits store may count for it."""

    allowance: Allowance
    states: Sequence[BudgetState]
    in_store_until: float


def shown_users(buckets: Buckets, allowance: Allowance, indices: Iterable[int], at: Moment) -> Iterator[ShownUser]:
    """Yield the end users of an allowance at these indices, for an observer, which takes no lock.

    Counts may move to another end user meanwhile. So an end user is left out unless its name is the same before and after its use is read.
    """
    owner, cells = owner_of(allowance.holder), buckets.cells
    for index in indices:
        record = _record(owner, index)
        offsets = [buckets.shown_offset(f"{record}\n{each.window}") for each in allowance.limits.budgets if each.seconds]
        offset, rings = buckets.shown_offset(record), [each for each in offsets if each is not None]
        if offset is None or len(rings) < len(offsets):
            continue  # it has sent no request since a budget was added
        number = offset + SIZE + buckets.workers
        name = _name_at(buckets, owner, number)
        states, until = buckets.shown_states(record, allowance.limits, at), cells[number + 1]
        is_same = name == _name_at(buckets, owner, number) and all(cells[ring + RING_CELLS] == cells[number] for ring in rings)
        if name is not None and is_same:
            yield ShownUser(replace(allowance, holder=user_of(owner, name)), states, until)


def _name_at(buckets: Buckets, owner: str, number: int) -> str | None:
    """Return the name after the cell with an end user's number; None while a worker is writing it."""
    name = buckets.cells[number + 2 : number + 2 + _NAME].tobytes().rstrip(b"\0").decode("ascii", "replace")
    return name if buckets.cells[number] == _number_of(owner, name) else None


def _record(owner: str, index: int) -> str:
    return f"{owner}\nuser {index}"


def _table(holder: str) -> str:
    """Return the name of a table's record. No holder's name has a line break."""
    return f"{holder}\nusers"


def _clear(cells: Cells, start: int, count: int) -> None:
    for cell in range(start, start + count):
        cells[cell] = 0.0


def _number_of(owner: str, name: str) -> float:
    """Return the number of an end user: 52 bits, so that a float64 holds it exactly. 0 means none."""
    return float((int.from_bytes(sha256(user_of(owner, name).encode()).digest()[:7], "big") >> 4) + 1)
