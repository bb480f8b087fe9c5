"""A pool's servers that can take a request, in the order of their load, kept up to date instead of being worked out.

A choice among two hundred servers must not cost more than one among two. The rules: what is in here is available, and each
stands under the load that it has; a server tells its rankings of every change of either. Who has just been looked at goes
behind those of the same load, so that an idle pool is used evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """What is known of a server here."""

    @property
    def load(self) -> float:
        """In flight by weight."""

    @property
    def available(self) -> bool:
        """It can take a request."""


class Fillable(Ranked, Protocol):
    """What is known of a server that is given only so many requests."""

    @property
    def full(self) -> bool:
        """It has as many as it may have."""


R = TypeVar("R", bound=Ranked)
F = TypeVar("F", bound=Fillable)


class Ranking(Generic[R]):
    """Some servers by load. ``members`` are those that are available, in the order in which they were given."""

    __slots__ = ("_levels", "_load_of", "_servers", "members")

    def __init__(self, servers: Sequence[R]) -> None:
        self._servers = tuple(servers)
        self._levels: dict[float, dict[R, None]] = {}
        self._load_of: dict[R, float] = {}
        self.members: tuple[R, ...] = ()
        for server in servers:
            if server.available:
                self._insert(server)
        self._update_members()

    @property
    def available(self) -> Mapping[R, float]:
        """The members and their loads."""
        return self._load_of

    def least_busy(self) -> R | None:
        """One of the smallest load, another one each time; None when none is available."""
        levels = self._levels
        if not levels:
            return None
        level = levels[min(levels)]
        server = next(iter(level))
        del level[server]
        level[server] = None
        return server

    def update_load(self, server: R) -> None:
        """Its load has changed."""
        if server in self._load_of:
            self._remove(server)
            self._insert(server)

    def update_availability(self, server: R) -> None:
        """It may have become available, or be so no more."""
        known = server in self._load_of
        if known is server.available:
            return
        if known:
            self._remove(server)
        else:
            self._insert(server)
        self._update_members()

    def _insert(self, server: R) -> None:
        load = self._load_of[server] = server.load
        level = self._levels.get(load)
        if level is None:
            self._levels[load] = {server: None}
        else:
            level[server] = None

    def _remove(self, server: R) -> None:
        load = self._load_of.pop(server)
        level = self._levels[load]
        del level[server]
        if not level:
            del self._levels[load]

    def _update_members(self) -> None:
        self.members = tuple(server for server in self._servers if server in self._load_of)


def _nobody_waits() -> None:
    """Nobody is to be told."""


class BoundedRanking(Ranking[F]):
    """Servers that are given only so many requests at once: one that is full is no member until it has given one back.

    ``on_capacity`` is called whenever one of them has room.
    """

    __slots__ = ("on_capacity",)

    def __init__(self, servers: Sequence[F]) -> None:
        super().__init__(servers)
        self.on_capacity: Callable[[], None] = _nobody_waits

    def update_load(self, server: F) -> None:
        full = server.full
        if full is (server in self._load_of):
            super().update_availability(server)
        else:
            super().update_load(server)
        if not full:
            self.on_capacity()

    def update_availability(self, server: F) -> None:
        super().update_availability(server)
        if server.available:
            self.on_capacity()
