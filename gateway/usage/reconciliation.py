"""Compare the ledger with the engines' own token counters, and explain the difference by class. Pure.

An engine is one run of a server's process: its counters start at zero, only grow, and are sampled (``EngineSample``). A window is the time
between two samples of an engine. The rules: for each kind of tokens, the classes of a window add up to what the engine has counted in it. A
row belongs to the window in which its response ended. If a row is an estimate, its error is in the class of its request, or in
``estimates`` if the ledger has more tokens than the engine.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from gateway.ledger.engine_samples import EngineSample
from gateway.ledger.schema import COUNTERS

QUIET_WITHIN = 3600.0
"""Seconds. A window ends at the latest sample of an engine without requests, unless it is this much older than the latest sample."""

KINDS = ("prompt", "completion")


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of the counters of an engine; ``responses`` None: unknown."""

    prompt: int
    completion: int
    finished_prompt: int
    finished_completion: int
    responses: int | None


@dataclass(frozen=True, slots=True)
class ReconciledWindow:
    """A time in which a server's engine was sampled. It excludes ``begin`` and includes ``end``, in seconds since the epoch.

    ``is_quiet``: no request was in flight at either end, so every request is wholly inside or outside.
    """

    server: str
    model: str
    begin: float
    end: float
    is_quiet: bool
    growth: Growth


def windows(samples: Iterable[EngineSample], since: float, until: float) -> list[ReconciledWindow]:
    """Return the windows of all servers, ordered by server and time.

    A window starts at the last suitable sample up to ``since``, or at the engine's first sample, and ends at the last suitable sample up to
    ``until``. Engines of one server that run at the same time, as those of two gateways may, share a window.
    """
    made: list[ReconciledWindow] = []
    for _, of_server in groupby(sorted(samples, key=attrgetter("server", "started", "time")), key=attrgetter("server")):
        found = [window for engine in _engines(of_server) if (window := _window(engine, since, until)) is not None]
        made += _without_overlaps(sorted(found, key=attrgetter("begin", "end")))
    return made


def _engines(samples: Iterable[EngineSample]) -> Iterator[list[EngineSample]]:
    """Split the samples of a server, which are in order, by engine."""
    for _, group in groupby(samples, key=attrgetter("started")):
        engine: list[EngineSample] = []
        for sample in group:
            if engine and sample.falls_below(engine[-1]):
                yield engine
                engine = [replace(sample.at_start(engine[-1].time), quiet=False)]
            engine.append(sample)
        yield engine


def _window(engine: Sequence[EngineSample], since: float, until: float) -> ReconciledWindow | None:
    begin, end = _boundary(engine, since) or engine[0], _boundary(engine, until)
    if end is None or end.time <= begin.time:
        return None
    growth = _counters(operator.sub, end, begin)
    return ReconciledWindow(begin.server, end.model, begin.time, end.time, begin.quiet and end.quiet, growth)


def _boundary(engine: Sequence[EngineSample], time: float) -> EngineSample | None:
    """Return the last sample of a window that should end at ``time``; None if there is no sample up to that time.

    For a later time it is never an earlier sample, so consecutive windows are adjacent and do not overlap.
    """
    if not (until := [sample for sample in engine if sample.time <= time]):
        return None
    quiet = next((sample for sample in reversed(until) if sample.quiet), None)
    return quiet if quiet is not None and until[-1].time - quiet.time <= QUIET_WITHIN else until[-1]


def _without_overlaps(ordered: Iterable[ReconciledWindow]) -> list[ReconciledWindow]:
    merged: list[ReconciledWindow] = []
    for window in ordered:
        if merged and window.begin < merged[-1].end:
            before = merged.pop()
            end = max(before.end, window.end)
            merged.append(replace(before, end=end, is_quiet=False, growth=_counters(operator.add, before.growth, window.growth)))
        else:
            merged.append(window)
    return merged


def _counters(combine: Callable[[int, int], int], one: EngineSample | Growth, other: EngineSample | Growth) -> Growth:
    """Combine each counter of two values. The result is unknown if one of the two is."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in COUNTERS]
    combined: list[Any] = [None if None in pair else combine(*pair) for pair in pairs]
    return Growth(*combined)


def gaps(of_server: Sequence[ReconciledWindow], since: float, until: float) -> list[tuple[float, float]]:
    """Return the times between ``since`` and ``until`` that no window of a server covers: (exclusive, inclusive)."""
    found, at = [], since
    for window in of_server:
        if window.begin > at:
            found.append((at, window.begin))
        at = max(at, window.end)
    return [*found, (at, until)] if at < until else found


@dataclass(frozen=True, slots=True)
class RowSums:
    """The tokens of one kind in the rows of a server: of complete responses, of truncated responses, and of lost requests.

    ``choices``, ``truncated_choices``: the additional tokens that the engine counts if each request has all its ``n`` choices; 0 for
    completions. ``estimated``: the part of all three that is estimated. ``mirrored``: the part of ``complete`` and ``truncated`` that is of
    copies of requests, and ``continued`` that of continued streams on several servers.
    """

    complete: int = 0
    truncated: int = 0
    lost: int = 0
    choices: int = 0
    truncated_choices: int = 0
    estimated: int = 0
    mirrored: int = 0
    continued: int = 0

    @property
    def total(self) -> int:
        return self.complete + self.truncated + self.lost


@dataclass(frozen=True, slots=True)
class LedgerSums:
    """The rows of a server in a time.

    ``requests``: requests that were sent to it; ``uncounted``: complete requests without an exact count.
    """

    prompt: RowSums = RowSums()
    completion: RowSums = RowSums()
    requests: int = 0
    uncounted: int = 0


@dataclass(frozen=True, slots=True)
class Classes:
    """The tokens of one kind that an engine has counted, by class. ``engine`` is the sum of all other fields.

    ``ledger``: tokens recorded for complete and truncated responses. ``mirrored``: the same for copies of requests. ``continued``: what
    servers that a stream has lost have counted for it, and for its last server the longer prompt, without the tokens that others made, so
    that the number may be negative. ``choices``: the
    prompt, again for each further of ``n`` choices. ``not_delivered``: completion tokens that were generated and not delivered.
    ``cancelled_prefill``: prompts that were computed for requests that were cancelled before their first event. ``direct_use``: requests
    that did not come through the gateway. ``lost``: recorded for requests whose worker died. ``uncounted``: complete responses for which
    the server reports no count, beyond their estimate. ``estimates``: what the ledger has estimated beyond the engine's count, a negative
    number. ``difference``: none of these, for example rows of an engine that has lost its counters; negative if the ledger has more than
    the engine.
    """

    engine: int = 0
    ledger: int = 0
    mirrored: int = 0
    continued: int = 0
    choices: int = 0
    not_delivered: int = 0
    cancelled_prefill: int = 0
    direct_use: int = 0
    lost: int = 0
    uncounted: int = 0
    estimates: int = 0
    difference: int = 0

    def __add__(self, other: Classes) -> Classes:
        return Classes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def classify(growth: Growth, ledger: LedgerSums) -> tuple[Classes, Classes]:
    """Explain the count of an engine in a window by the rows of that window. Returns the classes of prompts and completions.

    Whether there was direct use is known from the number of HTTP responses. Its tokens belong to finished requests beyond the complete
    rows. They are an upper bound if clients also disconnected from responses that the engine had finished.
    """
    is_direct = growth.responses is None or growth.responses > ledger.requests
    prompt = _classes(growth.prompt, growth.finished_prompt, ledger.prompt, is_direct, ledger.uncounted > 0)
    completion = _classes(growth.completion, growth.finished_completion, ledger.completion, is_direct, ledger.uncounted > 0)
    again = min(prompt.not_delivered, ledger.prompt.truncated_choices)
    cancelled = prompt.not_delivered - again
    return replace(prompt, choices=prompt.choices + again, not_delivered=0, cancelled_prefill=cancelled), completion


def _classes(engine: int, finished: int, rows: RowSums, is_direct: bool, has_uncounted: bool) -> Classes:
    remainder = engine - rows.total - rows.choices
    unrecorded = min(max(finished - rows.complete - rows.choices, 0), max(remainder, 0))  # finished by the engine, in no complete row
    direct = unrecorded if is_direct else 0
    uncounted = unrecorded if has_uncounted and not is_direct else 0
    rest = remainder - direct - uncounted
    estimates = max(min(rest, 0), -rows.estimated)
    return Classes(
        engine=engine,
        ledger=rows.complete + rows.truncated - rows.mirrored - rows.continued,
        mirrored=rows.mirrored,
        continued=rows.continued,
        choices=rows.choices,
        not_delivered=max(rest, 0),
        direct_use=direct,
        lost=rows.lost,
        uncounted=uncounted,
        estimates=estimates,
        difference=min(rest, 0) - estimates,
    )


@dataclass(frozen=True, slots=True)
class ReconciledServer:
    """The result for one server between two times, in seconds since the epoch: the times of its first and last window.

    ``prompt_in_progress``, ``completion_in_progress``: tokens of requests that were in flight at an end of a window. Each class may be
    wrong by this number. ``prompt_unsampled``, ``completion_unsampled``: tokens of the ledger outside of the windows, which no counter
    confirms, for example after the last sample of a killed engine. ``engines``: number of windows.
    """

    model: str
    server: str
    since: float
    until: float
    engines: int
    prompt: Classes
    completion: Classes
    prompt_in_progress: int = 0
    completion_in_progress: int = 0
    prompt_unsampled: int = 0
    completion_unsampled: int = 0


def unbilled(found: Iterable[ReconciledServer]) -> dict[tuple[str, str], int]:
    """Return the tokens that engines have counted and that are not billed, by model and class."""
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for each in found:
        for reason in UNBILLED:
            totals[each.model, reason] += getattr(each.prompt, reason) + getattr(each.completion, reason)
    return dict(totals)


UNBILLED = ("not_delivered", "cancelled_prefill", "direct_use")
"""The classes of tokens that engines have counted and that are not billed."""
