"""Decides which launched models run: the next ones to start, drain, put to sleep and stop. Pure.

Models that need the same GPUs, or belong to a group with a limit on running models, share them over time. ``decide`` gets the state of all
models and returns the actions to start now. ``forecast`` estimates when each model that is not up will be. The rules:

- A running model holds its GPUs and its share of the group from its start until its last process has exited. A sleeping model holds
  nothing.
- The model that has waited longest is served first. No later model takes GPUs that it needs.
- A model makes room for another one when it has been unused for a moment (``linger``), or when its time slice has expired, even if it is
  busy. It then gets no new requests, and stops after its last request has finished. No request is cut. So a requested model waits, for each
  model before it, at most for a time slice, the last requests, and a stop and a start.
- A time slice is twice the time that the model takes to start, within limits. If all models want to run, at least two thirds of the time
  are used for requests.
- The operator has put two eager models on one GPU, so they fit. In a group, only the number of running models is limited.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from operator import attrgetter
from typing import Any


class ModelPhase(StrEnum):
    """The phase of a launched model."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"


class ActionKind(StrEnum):
    """The kinds of action. ``RESUME`` lets a draining model accept requests again."""

    START = "start"
    WAKE = "wake"
    DRAIN = "drain"
    RESUME = "resume"
    SLEEP = "sleep"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Action:
    """One action to start now. ``why`` is for the operator."""

    kind: ActionKind
    model: str
    why: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ModelView:
    """The state of one model at one time.

    ``since``: when it entered its phase. ``needs``: the resources that it cannot share: its GPUs and its address. ``capacity``: the models
    of its group that may run. ``wanted_since``: since when requests are queued for it, or None. ``drain_acknowledged``: it drains, and all
    workers send it no new requests. ``start_seconds`` and ``stop_seconds``: how long it takes to start (from sleep: to wake) and to stop.
    ``eager``: it runs whenever its GPUs are free. ``held``: the operator has stopped it, with ``drain_timeout`` for its requests.
    ``in_transition``: an action is under way, so no other action is started.
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


NOT_RUNNING = frozenset({ModelPhase.STOPPED, ModelPhase.SLEEPING})
"""The phases in which a model holds no GPUs."""
SHORTEST_SLICE, LONGEST_SLICE = 1.0, 300.0
LONGEST_LINGER = 5.0
_OVERDUE = 0.25  # a start that takes longer than the last one is expected to take this share longer again


def time_slice(view: ModelView) -> float:
    """Return the seconds for which a model may run while others wait for its GPUs."""
    return min(max(2 * view.start_seconds, SHORTEST_SLICE), LONGEST_SLICE)


def linger(view: ModelView) -> float:
    """Return the seconds without use after which a model makes room before its time slice expires."""
    return min(time_slice(view) / 4, LONGEST_LINGER)


def compete(one: ModelView, other: ModelView) -> bool:
    """Return whether two models can never run together because of their GPUs or their address."""
    if one.model == other.model or (one.group is not None and one.group == other.group):
        return False
    return bool(one.needs & other.needs) and (one.on_demand or other.on_demand)


def decide(views: Sequence[ModelView], now: float) -> tuple[Action, ...]:
    """Return the actions to start now. Each model is in at most one action; ``START`` and ``WAKE`` are last."""
    starts: list[Action] = []
    displaced: dict[str, str] = {}
    holding = [view for view in views if view.phase not in NOT_RUNNING]
    for view in _queue(views):
        if not (blockers := _blockers(view, holding, lambda other: _stop_order(other, now))):
            starts.append(Action(ActionKind.WAKE if view.phase is ModelPhase.SLEEPING else ActionKind.START, view.model, _why(view)))
        elif view.wanted_since is None:
            continue  # an eager model does not displace another one
        elif not any(blocker.phase in NOT_RUNNING for blocker in blockers):
            displaced |= {blocker.model: f"makes room for {view.model}" for blocker in blockers}
        holding.append(view)
    started = {action.model for action in starts}
    others = (_next(view, displaced.get(view.model), now) for view in views if view.model not in started and not view.in_transition)
    return (*(action for action in others if action is not None), *starts)


def forecast(views: Sequence[ModelView], now: float) -> dict[str, float]:
    """Estimate when each model will be up. Models that are up, failed or held are omitted."""
    expected = {view.model: _started(view, now) for view in views if view.phase is ModelPhase.STARTING and not view.held}
    free = {view.model: _free_at(view, now) for view in views if view.phase not in NOT_RUNNING}
    holding = [view for view in views if view.phase not in NOT_RUNNING]
    for view in sorted(
        (view for view in views if not view.held and (view.phase in NOT_RUNNING or view.phase is ModelPhase.DRAINING)),
        key=lambda view: inf if view.wanted_since is None else view.wanted_since,
    ):
        others = [other for other in holding if other.model != view.model]
        blockers = _blockers(view, others, lambda other: free[other.model])
        begins = max([now, *(free[blocker.model] for blocker in blockers)])
        expected[view.model] = begins + (view.stop_seconds if view.phase is ModelPhase.DRAINING else 0.0) + view.start_seconds
        if view.wanted_since is not None:
            free[view.model] = expected[view.model] + time_slice(view) + view.stop_seconds
            holding = [*others, view]
    return expected


# The model to start next


def _queue(views: Sequence[ModelView]) -> Iterator[ModelView]:
    """Yield the models that could start: the requested ones by their waiting time, then the eager ones."""
    stopped = [view for view in views if view.phase in NOT_RUNNING and not view.held and not view.in_transition]
    yield from sorted((view for view in stopped if view.wanted_since is not None), key=attrgetter("wanted_since"))
    yield from (view for view in stopped if view.wanted_since is None and view.eager and view.phase is ModelPhase.STOPPED)


def _why(view: ModelView) -> str:
    if view.wanted_since is not None:
        return "requested"
    return "eager, and its GPUs are free" if any(isinstance(need, int) for need in view.needs) else "eager"


def _blockers(view: ModelView, holding: Sequence[ModelView], by: Callable[[ModelView], Any]) -> list[ModelView]:
    """Return the models that have to stop before this one can run. If several would do, the first by ``by`` stop."""
    rivals = [other for other in holding if compete(view, other)]
    same_group = [other for other in holding if other.group is not None and other.group == view.group]
    surplus = max(len(same_group) + 1 - view.capacity, 0)
    return [*rivals, *sorted(same_group, key=by)[:surplus]]


def _stop_order(view: ModelView, now: float) -> tuple[bool, bool, bool, bool, float]:
    """Order the models of a group: draining ones first, then those that may stop, unused before busy, the least recently used first."""
    return view.phase in NOT_RUNNING, view.phase is not ModelPhase.DRAINING, not _may_stop(view, now), view.in_flight > 0, view.last_used


# The next action of a running model


def _next(view: ModelView, displaced_by: str | None, now: float) -> Action | None:
    """Return the action for a model that is not started, or None. ``displaced_by``: why it has to stop for another model, or None."""
    do, why = None, "requested by the operator" if view.held else displaced_by or _unused(view, now)
    match view.phase:
        case ModelPhase.READY | ModelPhase.FAILED:
            if view.held or (displaced_by and _may_stop(view, now)) or (why and not displaced_by):
                do = ActionKind.DRAIN
        case ModelPhase.DRAINING:
            do = _after_draining(view, now) if why else ActionKind.RESUME
        case ModelPhase.STARTING if view.held:
            do = ActionKind.DRAIN if view.in_flight else ActionKind.STOP  # one of its servers may still have requests
        case ModelPhase.SLEEPING if view.held or _unused_for(view, view.idle_stop, now):
            do = ActionKind.STOP
    return None if do is None else Action(do, view.model, why or "it is used again")


def _after_draining(view: ModelView, now: float) -> ActionKind | None:
    quiet = view.drain_acknowledged and not view.in_flight
    if not quiet and not (view.held and now >= view.since + view.drain_timeout):
        return None
    stops = view.held or not view.sleeps or _unused_for(view, view.idle_stop, now)
    return ActionKind.STOP if stops else ActionKind.SLEEP


def _may_stop(view: ModelView, now: float) -> bool:
    if view.phase is ModelPhase.FAILED:
        return True
    return view.phase is ModelPhase.READY and (_unused_for(view, linger(view), now) or now >= view.ready_since + time_slice(view))


def _unused(view: ModelView, now: float) -> str | None:
    """Return why a model is no longer needed, or None."""
    due = [limit for limit in (view.idle_stop, view.idle_sleep) if limit is not None and _unused_for(view, limit, now)]
    return f"unused for {max(due):g} s" if due else None


def _unused_for(view: ModelView, limit: float | None, now: float) -> bool:
    return limit is not None and view.wanted_since is None and not view.in_flight and now >= max(view.last_used, view.ready_since) + limit


# Estimates


def _started(view: ModelView, now: float) -> float:
    return max(view.since + view.start_seconds, now + _OVERDUE * (now - view.since))


def _free_at(view: ModelView, now: float) -> float:
    """Return when another model may use the GPUs of a running model."""
    match view.phase:
        case ModelPhase.STARTING:
            return _started(view, now) + time_slice(view) + view.stop_seconds
        case ModelPhase.READY:
            idle = not view.in_flight and view.wanted_since is None
            end = min(view.ready_since + time_slice(view), view.last_used + linger(view)) if idle else view.ready_since + time_slice(view)
            return max(end, now) + view.stop_seconds
    return now + view.stop_seconds
