"""A pool's available servers, sorted by load and updated incrementally.

A choice among two hundred servers must not cost more than a choice among two. The rules: a ranking contains exactly the available servers,
each under its current load, and a server reports every change of either to its rankings. ``least_busy`` moves the returned server behind
the other servers of the same load, so that an idle pool is used evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from upstream.balancing.policies.policy import C, Candidate


class Ranked(Candidate, Protocol):
    """A server, as far as a ranking knows it."""

    @property
    def available(self) -> bool:
        """Whether the server can take a request."""


class Limited(Ranked, Protocol):
    """A server with a concurrency limit."""

    def full_for(self, tier: int, /) -> bool:
        """Return whether the server has no slot for a request of this tier."""

    def available_for(self, tier: int, /) -> bool:
        """Return whether the server can take a request of this tier."""


R = TypeVar("R", bound=Ranked)
F = TypeVar("F", bound=Limited)


@dataclass(frozen=True, slots=True)
class CandidateList(Generic[C]):
    """A few servers, for the rare choice that a ranking does not cover. ``offset``: which of several idle servers is returned."""

    members: Sequence[C]
    offset: int

    def __contains__(self, server: object) -> bool:
        return server in self.members

    def least_busy(self) -> C:
        """Return a server with the smallest load."""
        first = self.offset % len(self.members)
        return min((*self.members[first:], *self.members[:first]), key=lambda server: server.load)


class Ranking(Generic[R]):
    """The available servers of a set, ordered by load. ``members`` are in the order of the given servers."""

    __slots__ = ("_levels", "_load_of", "_servers", "members")

    def __init__(self, servers: Sequence[R]) -> None:
        self._servers = tuple(servers)
        self._levels: dict[float, dict[R, None]] = {}
        self._load_of: dict[R, float] = {}
        self.members: tuple[R, ...] = ()
        for server in servers:
            if self._can_take(server):
                self._insert(server)
        self._update_members()

    def _can_take(self, server: R) -> bool:
        return server.available

    def __contains__(self, server: object) -> bool:
        return server in self._load_of

    def least_busy(self) -> R:
        """Return a server with the smallest load. Servers with equal load alternate. Raises ValueError if no server is available."""
        levels = self._levels
        level = levels[min(levels)]
        server = next(iter(level))
        del level[server]
        level[server] = None
        return server

    def update_load(self, server: R) -> None:
        """Move a server whose load has changed."""
        if server in self._load_of:
            self._remove(server)
            self._insert(server)

    def update_availability(self, server: R) -> None:
        """Add a server that has become available, or remove a server that no longer is."""
        is_ranked = server in self._load_of
        if is_ranked is not self._can_take(server):
            change = self._remove if is_ranked else self._insert
            change(server)
            self._update_members()

    def _insert(self, server: R) -> None:
        load = self._load_of[server] = server.load
        self._levels.setdefault(load, {})[server] = None

    def _remove(self, server: R) -> None:
        load = self._load_of.pop(server)
        level = self._levels[load]
        del level[server]
        if not level:
            del self._levels[load]

    def _update_members(self) -> None:
        self.members = tuple(server for server in self._servers if server in self._load_of)


class BoundedRanking(Ranking[F]):
    """Servers with a concurrency limit, for requests of one tier. A full server is not ranked until one of its requests finishes.

    ``on_capacity`` is called whenever a server may have capacity again.
    """

    __slots__ = ("_tier", "on_capacity")

    def __init__(self, servers: Sequence[F], tier: int = 0) -> None:
        self._tier = tier
        super().__init__(servers)
        self.on_capacity: Callable[[], None] = lambda: None

    def _can_take(self, server: F) -> bool:
        return server.available_for(self._tier)

    def update_load(self, server: F) -> None:
        """Update the rank of a server whose load has changed. Remove a server that became full; add a server that is no longer full."""
        full = server.full_for(self._tier)
        if full is (server in self._load_of):
            super().update_availability(server)
        else:
            super().update_load(server)
        if not full:
            self.on_capacity()

    def update_availability(self, server: F) -> None:
        """Add a server that has become available, or remove a server that no longer is."""
        super().update_availability(server)
        if self._can_take(server) or not self.members:  # when the last server was ejected, ejected servers get requests again
            self.on_capacity()
