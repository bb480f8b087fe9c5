"""A model's servers, and the fleet of all of them.

``LiveServers`` owns the live servers. The rule: a server whose spec did not change is the same object before and
after a reload, with its connections and its count; one that is gone is retired, never cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

from upstream.balancing.affinity import Affinity
from upstream.balancing.policies import POLICIES, Policy, least_busy
from upstream.balancing.ranking import BoundedRanking, Ranking
from upstream.balancing.retry_budget import RetryBudget
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.write_batching import WriteBatch


class NoServerError(Exception):
    """No server of a model can take a request now. ``loading`` says that one will be able to, ``full`` that some are up and have all
    that they may have."""

    def __init__(self, *, loading: bool = False, full: bool = False) -> None:
        super().__init__("full" if full else "loading" if loading else "none is up")
        self.loading = loading
        self.full = full


class Pool:
    """The servers of one model and how to choose among them."""

    def __init__(self, servers: Sequence[Server], balance: str) -> None:
        self.servers = tuple(servers)
        self._policy: Policy[Server] = POLICIES[balance]  # type: ignore[assignment]  # a Server is a Candidate
        self._affinity = Affinity(self.servers) if balance == "prefix" and len(servers) > 1 else None
        self._by_load = self._policy is least_busy
        bounded = any(server.limit < math.inf for server in self.servers)
        self._only = self.servers[0] if len(servers) == 1 and not bounded else None
        self._bounded = BoundedRanking(self.servers) if bounded else None
        self._ranking = self._bounded or (Ranking(self.servers) if len(servers) > 1 else None)
        if self._ranking is not None:
            for server in self.servers:
                server.rankings.append(self._ranking)
        self._choices = 0
        self._retry_budget = RetryBudget()

    def retire(self) -> None:
        """The next snapshot has another pool; who is still served by this one chooses the long way."""
        ranking, self._ranking = self._ranking, None
        if ranking is not None:
            for server in self.servers:
                server.rankings.remove(ranking)

    @property
    def is_up(self) -> bool:
        """Whether one of them is up."""
        return any(server.condition is Condition.UP for server in self.servers)

    def has_capacity(self) -> bool:
        """Whether ``choose`` gives a server now to who has tried none."""
        if self._ranking is not None and self._ranking.members:
            return True
        up = self._up_servers()
        return bool(up) and not _all_taken(up)

    def on_capacity(self, tell: Callable[[], None]) -> None:
        """Have somebody told whenever a server that may be full has room. Nobody waits for the others."""
        if self._bounded is not None:
            self._bounded.on_capacity = tell

    def _up_servers(self) -> list[Server]:
        return [server for server in self.servers if server.condition is Condition.UP]

    @property
    def wants_hint(self) -> bool:
        """Whether ``choose`` has a use for a hint."""
        return self._affinity is not None

    def try_spend_retry(self) -> bool:
        """Whether the traffic so far allows for one more second attempt, which is then used up."""
        return self._retry_budget.try_spend(self._choices, monotonic())

    def choose(self, tried: Sequence[Server] = (), hint: int | None = None) -> Server:
        """The server for the next attempt: an untried, available one by the policy; else what is left.

        A server that is up but passed over for its failures, or was tried, is taken only when there is no other, so the last one
        that is up is never passed over; one that is full never, and one that is passed over not as long as others are merely
        full. ``hint`` is the same for requests that begin alike.
        Raises NoServerError when none is up, or all are full.
        """
        self._choices += 1
        only = self._only
        if only is not None and only.condition is Condition.UP:
            return only
        if not tried and self._ranking is not None and self._ranking.members:
            return self._choose_ranked(self._ranking, hint)
        up = self._up_servers()
        if not up:
            raise NoServerError(loading=any(server.condition is Condition.LOADING for server in self.servers))
        if _all_taken(up):
            raise NoServerError(full=True)
        room = [server for server in up if not server.full]
        fresh = [server for server in room if server not in tried] or room
        among = [server for server in fresh if server.available] or fresh
        known = self._affinity.choose(among, hint) if self._affinity is not None and hint is not None else None
        return known or self._policy(among, self._choices)

    def _choose_ranked(self, ranking: Ranking[Server], hint: int | None) -> Server:
        """The choice among all that are available, without a look at each."""
        known = self._affinity.choose(ranking.available, hint) if self._affinity is not None and hint is not None else None
        return known or (ranking.least_busy() if self._by_load else None) or self._policy(ranking.members, self._choices)


def _all_taken(up: Sequence[Server]) -> bool:
    """Whether the servers that can be trusted with a request are full. Where all are passed over for their failures, these are all."""
    trusted = [server for server in up if not server.is_ejected]
    return all(server.full for server in trusted or up)


class LiveServers:
    """Every live server by name. ``write_batch``: that of all who write in this process."""

    def __init__(self, write_batch: WriteBatch | None = None) -> None:
        self.write_batch = write_batch or WriteBatch()
        self._servers: dict[str, Server] = {}

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def reconcile(self, specs: Iterable[ServerSpec]) -> Mapping[str, Server]:
        """Make the live servers those of ``specs``: the same ones stay, new ones begin, others retire."""
        wanted = {spec.name: spec for spec in specs}
        kept = {name: server for name, server in self._servers.items() if wanted.get(name) == server.spec}
        for name, server in self._servers.items():
            if name not in kept:
                server.retire()
        self._servers = {name: kept.get(name) or Server(spec, write_batch=self.write_batch) for name, spec in wanted.items()}
        return self._servers

    def set_condition(self, name: str, condition: Condition) -> None:
        """Take over what control found out; a name that is no longer here is ignored."""
        server = self._servers.get(name)
        if server is not None:
            server.condition = condition

    def expire(self) -> None:
        """Close idle connections that were kept too long."""
        for server in self._servers.values():
            server.expire()

    def close(self) -> None:
        """Close every idle connection."""
        for server in self._servers.values():
            server.retire()


@contextmanager
def live_servers(write_batch: WriteBatch | None = None) -> Iterator[LiveServers]:
    """A fleet whose idle connections are closed in the end."""
    servers = LiveServers(write_batch)
    try:
        yield servers
    finally:
        servers.close()
