"""Where requests wait for a model that is not up yet: one room per model, bounded, in order of arrival.

A room is open while control expects its model to come up, and knows when. Those in it are looked at by the relay's one
clock, and called when a server is up. The rules: a place is given back by the ``with`` that took it, so a client that
leaves frees it at once; control is told whenever it changes since when a model is asked for; who was sent away with a
Retry-After is expected back, so until then his model stays asked for.

Times are in seconds of the monotonic clock, which every process's event loop shares.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from gateway.errors import Refusal
from gateway.scoreboard import Cells
from gateway.state import Model, Queue
from upstream.deadlines import Deadlines

Ask = Callable[[str, float | None], None]
"""Tells control since when a model is asked for; None: nobody asks for it any more."""

NO_QUEUE = Queue(size=0, wait=0.0)
RETURN = 2.0
"""Seconds for which a client may be late that comes back after its Retry-After."""


def nobody(_model: str, _since: float | None) -> None:
    """Asks in vain: for a relay without a control process."""


class Lobby:
    """The rooms of a relay. ``cells`` gives a model's gauge of waiting requests."""

    def __init__(self, deadlines: Deadlines, cells: Callable[[str], Cells], ask: Ask) -> None:
        self._deadlines = deadlines
        self._cells = cells
        self._ask = ask
        self._rooms: dict[str, Room] = {}

    def expect(self, models: Iterable[Model]) -> None:
        """Have a room for each model of a new generation; those who wait stay where they are."""
        before, self._rooms = self._rooms, {}
        for model in models:
            room = before.pop(model.id, None) or Room(model.id, self._deadlines, self._cells(model.id), self._ask)
            room.queue = model.queue or NO_QUEUE
            self._rooms[model.id] = room
        for room in before.values():
            room.call()

    def learn(self, expected: Mapping[str, float], is_up: Callable[[str], bool]) -> None:
        """Take over when each model is expected that is not up; who need not wait any longer is called."""
        for model, room in self._rooms.items():
            room.eta = expected.get(model)
            if room.eta is None or is_up(model):
                room.call()

    def place(self, model: str, since: float) -> Place:
        """A place in a model's room, for a request that waits since then. Raises Refusal no_healthy_server for a model that is gone."""
        room = self._rooms.get(model)
        if room is None:
            raise _none_healthy()
        return Place(room, since)

    def is_expected(self, model: str) -> bool:
        """Whether a model is on its way, as control sees it."""
        room = self._rooms.get(model)
        return room is not None and room.eta is not None

    def tick(self) -> None:
        """Give up clients that have not come back."""
        now = monotonic()
        for room in self._rooms.values():
            room.tick(now)

    def close(self) -> None:
        """The gateway is stopping: who waits is told so, and nobody else comes in."""
        for room in self._rooms.values():
            room.closing = True
            room.call()


class Room:
    """Those who wait for one model. ``eta``: when it is expected; None: there is nothing to wait for."""

    def __init__(self, model: str, deadlines: Deadlines, gauge: Cells, ask: Ask) -> None:
        self.queue = NO_QUEUE
        self.eta: float | None = None
        self.closing = False
        self.deadlines = deadlines
        self._model = model
        self._gauge = gauge
        self._ask = ask
        self._places: dict[Place, None] = {}
        self._asked: float | None = None
        self._returning: tuple[float, float] | None = None
        """Since when those who were sent away have asked, and until when they are expected back."""

    def enter(self, place: Place) -> None:
        """Take a place at the end, or before those who came later. Raises Refusal."""
        if self.closing:
            raise Refusal("draining", "The gateway is shutting down.")
        if self.eta is None:
            raise _none_healthy()
        if len(self._places) >= self.queue.size:
            raise self.send_away(place.since)
        last = next(reversed(self._places), place)
        self._places[place] = None
        if place.since < last.since:  # it was called before, and the server had gone again
            self._places = dict.fromkeys(sorted(self._places, key=lambda each: each.since))
        self._note()

    def leave(self, place: Place) -> None:
        """Give a place back."""
        del self._places[place]
        self._note()

    def call(self) -> None:
        """Let everybody try, in order."""
        self._returning = None
        for place in self._places:
            place.call()
        self._note()

    def send_away(self, since: float) -> Refusal:
        """What one is told who cannot wait, or has waited too long: when to come back. He is expected then."""
        now = monotonic()
        seconds = max(math.ceil((self.eta or now) - now), 1)
        first, until = self._returning or (since, 0.0)
        self._returning = min(first, since), max(until, now + seconds + RETURN)
        self._note()
        return Refusal("model_loading", f"The model is being loaded. Try again in {seconds} s.", headers={"retry-after": str(seconds)})

    def tick(self, now: float) -> None:
        if self._returning is not None and now > self._returning[1]:
            self._returning = None
            self._note()

    def _note(self) -> None:
        """Leave the number for others to read, and tell control when it has changed since when the model is asked for."""
        self._gauge[0] = len(self._places)
        oldest = next((place.since for place in self._places), None)
        asked = min((since for since in (oldest, self._returning and self._returning[0]) if since is not None), default=None)
        if asked != self._asked:
            self._asked = asked
            self._ask(self._model, asked)


class Place:
    """One request's place in a room. Watched by the relay's clock."""

    __slots__ = ("_call", "_room", "since")

    def __init__(self, room: Room, since: float) -> None:
        self.since = since
        self._room = room
        self._call: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Place:
        self._room.enter(self)
        self._room.deadlines.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._room.deadlines.forget(self)
        self._room.leave(self)

    async def called(self) -> None:
        """Wait until a server may be up. Raises Refusal model_loading when the wait is over before."""
        refusal = await self._call
        if refusal is not None:
            raise refusal

    def call(self) -> None:
        if not self._call.done():
            self._call.set_result(None)

    def check(self, now: float) -> None:
        if now - self.since > self._room.queue.wait and not self._call.done():
            self._call.set_result(self._room.send_away(self.since))


def _none_healthy() -> Refusal:
    return Refusal("no_healthy_server", "No server of this model is healthy at the moment.")
