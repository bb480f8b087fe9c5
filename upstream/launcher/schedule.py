"""Which launched models run: what to start, to drain, to put to sleep and to stop next. Pure.

Models that need the same GPUs, or are of a group that runs only so many at once, take turns. ``decide`` is given the
whole picture and says what to begin now; ``forecast`` says when each model that is not up may be. The rules:

- A place is taken from the moment a model is started until nothing of it is left. One that sleeps takes none.
- Who has waited longest is served first, and nobody younger takes a place that it needs.
- A model leaves for another one when it has been unused for a moment (``linger``), or when its turn is over, however
  busy it is: it then takes no new requests, and is stopped when its last one has ended. None is cut. So a model that is
  wanted waits, for each of those before it, no longer than a turn, their last requests, and a stop and a start.
- A turn is twice the time that the model takes to start, within bounds: where everybody wants to run, two thirds
  of the time or more go into answers.
- Two eager models on one GPU have been put there by the operator, so they fit. Within a group only its number counts.

Times are in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any


class ModelPhase(StrEnum):
    """Where a model is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"


class ActionKind(StrEnum):
    """What can be begun. ``RESUME`` puts a draining model back to work."""

    START = "start"
    WAKE = "wake"
    DRAIN = "drain"
    RESUME = "resume"
    SLEEP = "sleep"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to begin now; ``why`` is for the operator."""

    kind: ActionKind
    model: str
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model at a moment.

    ``since``: when it entered its phase. ``needs``: what no other can have meanwhile, GPUs and the place where it listens.
    ``capacity``: how many of its group may run. ``wanted_since``: since when requests wait for it, None when none does.
    ``drain_acknowledged``: while it drains, everybody knows that it takes no new ones. ``start_seconds`` and
    ``stop_seconds``: how long it takes to start (asleep: to wake) and to stop. ``eager``: it is to run whenever there is room.
    ``held``: the operator wants it down, and waits ``drain_timeout`` for its requests. ``in_transition``: something is being done
    with it already, so it is left alone.
    """

    model: str
    phase: ModelPhase
    since: float = 0.0
    needs: frozenset[int | str] = frozenset()
    group: str | None = None
    capacity: int = 1
    on_demand: bool = True
    wanted_since: float | None = None
    in_flight: int = 0
    drain_acknowledged: bool = False
    ready_since: float = 0.0
    last_used: float = 0.0
    start_seconds: float = 60.0
    stop_seconds: float = 5.0
    eager: bool = False
    sleeps: bool = False
    idle_stop: float | None = None
    idle_sleep: float | None = None
    held: bool = False
    drain_timeout: float = 30.0
    in_transition: bool = False


PARKED = frozenset({ModelPhase.STOPPED, ModelPhase.SLEEPING})
"""The phases in which a model takes no place."""
SHORTEST_TURN, LONGEST_TURN = 1.0, 300.0
LONGEST_LINGER = 5.0
_OVERDUE = 0.25  # a start that takes longer than it did is expected to take so much longer again


def time_slice(view: ModelView) -> float:
    """Seconds for which a model may serve while others wait for its place."""
    return min(max(2 * view.start_seconds, SHORTEST_TURN), LONGEST_TURN)


def linger(view: ModelView) -> float:
    """Seconds without use after which it leaves before its turn is over."""
    return min(time_slice(view) / 4, LONGEST_LINGER)


def compete(one: ModelView, other: ModelView) -> bool:
    """Whether the two can never run together because of their GPUs, or of the place where both are to listen."""
    if one.model == other.model or (one.group is not None and one.group == other.group):
        return False
    return bool(one.needs & other.needs) and (one.on_demand or other.on_demand)


def decide(views: Sequence[ModelView], now: float) -> tuple[Action, ...]:
    """What to begin now. Each model is in at most one action; ``START`` and ``WAKE`` come last."""
    begun: list[Action] = []
    leaving: dict[str, str] = {}
    holding = [view for view in views if view.phase not in PARKED]
    for view in _queue(views):
        blockers = _blockers(view, holding, lambda other: _last_to_leave(other, now))
        if not blockers:
            begun.append(Action(ActionKind.WAKE if view.phase is ModelPhase.SLEEPING else ActionKind.START, view.model, _why(view)))
        elif view.wanted_since is None:
            continue  # it is to run where there is room, and there is none
        elif not any(blocker.phase in PARKED for blocker in blockers):
            leaving |= {blocker.model: f"makes room for {view.model}" for blocker in blockers}
        holding.append(view)
    begins = {action.model for action in begun}
    ends = (_next(view, leaving.get(view.model), now) for view in views if view.model not in begins and not view.in_transition)
    return (*(action for action in ends if action is not None), *begun)


def forecast(views: Sequence[ModelView], now: float) -> dict[str, float]:
    """When each model that is not up may be, at the earliest that one can say; none that has failed or is held down."""
    expected = {view.model: _started(view, now) for view in views if view.phase is ModelPhase.STARTING and not view.held}
    free = {view.model: _free_at(view, now) for view in views if view.phase not in PARKED}
    holding = [view for view in views if view.phase not in PARKED]
    for view in sorted((view for view in views if _may_come(view)), key=_waiting_since):
        others = [other for other in holding if other.model != view.model]
        blockers = _blockers(view, others, lambda other: free[other.model])
        begins = max([now, *(free[blocker.model] for blocker in blockers)])
        expected[view.model] = begins + (view.stop_seconds if view.phase is ModelPhase.DRAINING else 0.0) + view.start_seconds
        if view.wanted_since is not None:
            free[view.model] = expected[view.model] + time_slice(view) + view.stop_seconds
            holding = [*others, view]
    return expected


# Who is served next


def _queue(views: Sequence[ModelView]) -> Iterator[ModelView]:
    """Those that could be started: the wanted ones by their waiting, then those that are to run where there is room."""
    parked = [view for view in views if view.phase in PARKED and not view.held and not view.in_transition]
    yield from sorted((view for view in parked if view.wanted_since is not None), key=attrgetter("wanted_since"))
    yield from (view for view in parked if view.wanted_since is None and view.eager and view.phase is ModelPhase.STOPPED)


def _may_come(view: ModelView) -> bool:
    return not view.held and (view.phase in PARKED or view.phase is ModelPhase.DRAINING)


def _waiting_since(view: ModelView) -> float:
    return float("inf") if view.wanted_since is None else view.wanted_since


def _why(view: ModelView) -> str:
    return "eager, and there is room" if view.wanted_since is None else "asked for"


def _blockers(view: ModelView, holding: Sequence[ModelView], by: Callable[[ModelView], Any]) -> list[ModelView]:
    """Those that have to leave, or have to have had their turn, before this one can run; where there is a choice, the first ``by``."""
    rivals = [other for other in holding if compete(view, other)]
    fellows = [other for other in holding if other.group is not None and other.group == view.group]
    surplus = max(len(fellows) + 1 - view.capacity, 0)
    return [*rivals, *sorted(fellows, key=by)[:surplus]]


def _last_to_leave(view: ModelView, now: float) -> tuple[bool, bool, bool, bool, float]:
    """Orders the members of a group: who leaves already, then who may, the unused before the busy, the least recently used first."""
    return view.phase in PARKED, view.phase is not ModelPhase.DRAINING, not _may_leave(view, now), view.in_flight > 0, view.last_used


# What becomes of the one that runs


def _next(view: ModelView, makes_room: str | None, now: float) -> Action | None:
    """What to begin with a model that is not to be started. ``makes_room``: for whom it is to leave, in words."""
    do, why = None, "the operator's word" if view.held else makes_room or _unused(view, now)
    match view.phase:
        case ModelPhase.READY | ModelPhase.FAILED:
            if view.held or (makes_room and _may_leave(view, now)) or (why and not makes_room):
                do = ActionKind.DRAIN
        case ModelPhase.DRAINING:
            do = _after_draining(view, now) if why else ActionKind.RESUME
        case ModelPhase.STARTING if view.held:
            do = ActionKind.DRAIN if view.in_flight else ActionKind.STOP  # a server of it that is to go may have requests still
        case ModelPhase.SLEEPING if view.held or _unused_for(view, view.idle_stop, now):
            do = ActionKind.STOP
    return None if do is None else Action(do, view.model, why or "it is used again")


def _after_draining(view: ModelView, now: float) -> ActionKind | None:
    quiet = view.drain_acknowledged and not view.in_flight
    if not quiet and not (view.held and now >= view.since + view.drain_timeout):
        return None
    stops = view.held or not view.sleeps or _unused_for(view, view.idle_stop, now)
    return ActionKind.STOP if stops else ActionKind.SLEEP


def _may_leave(view: ModelView, now: float) -> bool:
    if view.phase is ModelPhase.FAILED:
        return True
    unused = not view.in_flight and view.wanted_since is None and now >= max(view.last_used, view.ready_since) + linger(view)
    return view.phase is ModelPhase.READY and (unused or now >= view.ready_since + time_slice(view))


def _unused(view: ModelView, now: float) -> str | None:
    """Why it need not run any more, in words."""
    due = [limit for limit in (view.idle_stop, view.idle_sleep) if limit is not None and _unused_for(view, limit, now)]
    return f"unused for {max(due):g} s" if due else None


def _unused_for(view: ModelView, limit: float | None, now: float) -> bool:
    return limit is not None and view.wanted_since is None and not view.in_flight and now >= max(view.last_used, view.ready_since) + limit


# When


def _started(view: ModelView, now: float) -> float:
    return max(view.since + view.start_seconds, now + _OVERDUE * (now - view.since))


def _free_at(view: ModelView, now: float) -> float:
    """When the place of one that runs may be another's."""
    match view.phase:
        case ModelPhase.STARTING:
            return _started(view, now) + time_slice(view) + view.stop_seconds
        case ModelPhase.READY:
            idle = not view.in_flight and view.wanted_since is None
            end = min(view.ready_since + time_slice(view), view.last_used + linger(view)) if idle else view.ready_since + time_slice(view)
            return max(end, now) + view.stop_seconds
    return now + view.stop_seconds
