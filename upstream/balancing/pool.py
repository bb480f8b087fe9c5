"""The servers of one model and the choice among them, and all live servers of a worker.

The rules: a server that has failed, or was tried before, is chosen only if no other server is left, so the last server that is up always
gets requests. A full server is never chosen. A server whose specification did not change is the same object before and after a reload, with
its connections and its requests in flight; a removed server is retired and finishes its requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from time import monotonic
from typing import Protocol

from upstream.balancing.cost_model import Prompt
from upstream.balancing.policies.policy import NO_FACTS, Fact, Policy, RequestFacts
from upstream.balancing.ranking import BoundedRanking, CandidateList, Ranking
from upstream.balancing.retry_budget import RetryBudget
from upstream.balancing.server import Condition, Progress, Server, ServerSpec
from upstream.http.write_batching import WriteBatch

_COMPARED = 4  # servers with a free slot whose caches are compared: while requests wait, there is seldom more than one


class NoServerError(Exception):
    """No server of a model can accept a request now.

    ``loading``: a server is starting. ``full``: servers are up, and all of them are at their maximum of requests.
    """

    def __init__(self, *, loading: bool = False, full: bool = False) -> None:
        super().__init__("full" if full else "loading" if loading else "none is up")
        self.loading = loading
        self.full = full


class Pool:
    """The servers of one model, and the policy that chooses among them."""

    def __init__(self, servers: Sequence[Server], policy: Policy[Server]) -> None:
        self.servers = tuple(servers)
        self._policy = policy
        self.required_facts: frozenset[Fact] = policy.requires if len(servers) > 1 else frozenset()
        """Facts of a request that ``choose`` requires. Empty if the pool has one server."""
        bounded = any(server.limit < math.inf for server in self.servers)
        self.may_continue = len(servers) > 1
        """Whether there is another server for a stream whose server is lost."""
        self._only = self.servers[0] if len(servers) == 1 and not bounded else None
        self.tiers = max((len(server.reserved) for server in self.servers), default=0) if bounded else 0
        """The highest tier of a request: 0 if no slots are reserved."""
        self._bounded = BoundedRanking(self.servers) if bounded else None
        self._ranking = self._bounded or (Ranking(self.servers) if len(servers) > 1 else None)
        self._of_tiers = tuple(BoundedRanking(self.servers, tier) for tier in range(1, self.tiers + 1))
        # The ranking for all requests is updated last: it notifies of capacity, for which the others must be right.
        self._rankings = self._of_tiers if self._ranking is None else (*self._of_tiers, self._ranking)
        for server in self.servers:
            server.rankings.extend(self._rankings)
        self.knows_caches = policy.knows_caches and len(servers) > 1
        """Whether ``cached_tokens`` tells requests apart."""
        self._choices = 0
        self._retry_budget = RetryBudget()
        self.successor: Pool | None = None
        """The pool of the next snapshot, which has the servers that are still configured."""

    def retire(self) -> None:
        """Stop following the servers' load: the next snapshot has another pool. Requests of this one choose from it."""
        rankings, self._rankings, self._ranking, self._of_tiers, self._only = self._rankings, (), None, (), None
        for ranking in rankings:
            for server in self.servers:
                server.rankings.remove(ranking)

    @property
    def is_up(self) -> bool:
        """Whether at least one server is up."""
        return any(server.condition is Condition.UP for server in self.servers)

    def has_scale_out(self) -> bool:
        """Return whether all servers that are up have the routes of vLLM's ``--enable-scale-out``."""
        return all(server.scale_out for server in self._up_servers())

    def other_server(self, lost: Sequence[Server]) -> Server | None:
        """Return the least busy server that can take a small request, other than the lost ones."""
        others = [server for server in self._up_servers() if server not in lost and not server.is_ejected]
        return min(others, key=lambda server: server.load, default=None)

    def has_capacity(self, tier: int = 0) -> bool:
        """Return whether ``choose`` would now return a server for a request of this tier that has tried none."""
        ranking = self._ranking_of(tier)
        if ranking is not None and any(not server.full_for(tier) for server in ranking.members):
            return True
        return bool(_with_capacity(self._up_servers(), tier))

    def open_tier(self) -> float:
        """Return the highest tier that a request may have for which there is capacity: infinity for any, -1 for none."""
        if self.has_capacity(self.tiers):
            return math.inf
        return next((tier for tier in range(self.tiers - 1, -1, -1) if self.has_capacity(tier)), -1)

    def _ranking_of(self, tier: int) -> Ranking[Server] | None:
        return self._ranking if not tier or not self._of_tiers else self._of_tiers[min(tier, self.tiers) - 1]

    def cached_tokens(self, prompt: Prompt | None, tier: int) -> float:
        """Return the most tokens of a prompt that a server with a free slot for this tier has cached. Of many such servers, some count."""
        ranking = self._ranking_of(tier)
        if prompt is None or ranking is None:
            return 0.0
        return max((self._policy.cached_tokens(server, prompt) for server in ranking.members[:_COMPARED]), default=0.0)

    def on_capacity(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever a server with a concurrency limit has capacity. Requests never wait for the other servers."""
        if self._bounded is not None:
            self._bounded.on_capacity = callback

    def _up_servers(self) -> list[Server]:
        return [server for server in self.servers if server.condition is Condition.UP]

    def less_busy_of_two(self) -> Server | None:
        """Return a server for a small request that no policy places; None if no server is up.

        Two servers in turn are compared, so that this does not depend on the number of servers, nor changes the order of others.
        """
        servers = self._ranking.members if self._ranking is not None and self._ranking.members else self._up_servers()
        if not servers:
            return None
        first = self._choices % len(servers)
        return min(servers[first], servers[first - 1], key=lambda server: server.load)

    def try_spend_retry(self) -> bool:
        """Return whether the traffic so far allows another retry, and count it."""
        return self._retry_budget.try_spend(self._choices, monotonic())

    def choose(self, tried: Sequence[Server] = (), request: RequestFacts = NO_FACTS) -> Server:
        """Return the server for the next attempt.

        The policy chooses among the servers that are available and untried. If no candidate is left, it chooses among the servers that are
        up and not full. While other servers are merely full, an ejected server is not chosen. Raises NoServerError when no server is up, or
        all are full.
        """
        self._choices += 1
        only = self._only
        if only is not None and only.condition is Condition.UP:
            return only
        ranking, tier = self._ranking, request.tier
        if tier:
            ranking = self._ranking_of(tier)
        if not tried and ranking is not None and ranking.members:
            return self._policy.choose(ranking, request)
        if self.successor is not None:
            return self.successor.choose(tried, request)
        if not (up := self._up_servers()):
            raise NoServerError(loading=any(server.condition is Condition.LOADING for server in self.servers))
        if not (with_capacity := _with_capacity(up, tier)):
            raise NoServerError(full=True)
        untried = [server for server in with_capacity if server not in tried] or with_capacity
        candidates = [server for server in untried if server.available] or untried
        return self._policy.choose(CandidateList(candidates, self._choices), request)


class SharedPool(Pool):
    """A pool of servers whose slots other workers take and free too. So there may be capacity although requests are queued."""

    def choose(self, tried: Sequence[Server] = (), request: RequestFacts = NO_FACTS) -> Server:
        """Return the server for the next attempt, as a pool does, after the queued requests have had a choice. Its slot is taken."""
        if self.successor is not None:
            return self.successor.choose(tried, request)
        if self._bounded is not None:
            self._bounded.on_capacity()
        while not (server := super().choose(tried, request)).take_slot():
            pass  # another worker has taken its last slot since it was chosen
        return server


def _with_capacity(up: Sequence[Server], tier: int) -> list[Server]:
    """Return the servers with a slot for this tier. If all of them are ejected while another server is not, the list is empty."""
    with_capacity = [server for server in up if not server.full_for(tier)]
    is_usable = not all(server.is_ejected for server in with_capacity) or all(server.is_ejected for server in up)
    return with_capacity if is_usable else []


class CreateServer(Protocol):
    """Creates a live server."""

    def __call__(self, spec: ServerSpec, /, *, write_batch: WriteBatch) -> Server:
        """Return a server without connections."""


class LiveServers:
    """Every live server of a worker, by name. ``write_batch``: shared by all connections of the process. ``create``: makes a server."""

    def __init__(self, write_batch: WriteBatch | None = None, create: CreateServer = Server) -> None:
        self.write_batch = write_batch or WriteBatch()
        self._create = create
        self._servers: dict[str, Server] = {}
        self._retired: list[Server] = []

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def reconcile(self, specs: Iterable[ServerSpec]) -> Mapping[str, Server]:
        """Make the live servers match ``specs``: keep those with an unchanged specification, add new ones, retire the others."""
        wanted = {spec.name: spec for spec in specs}
        unchanged = {name: server for name, server in self._servers.items() if wanted.get(name) == server.spec}
        for name, server in self._servers.items():
            if name not in unchanged:
                server.retire()
                self._retired.append(server)
        self._servers = {name: unchanged.get(name) or self._create(spec, write_batch=self.write_batch) for name, spec in wanted.items()}
        return self._servers

    def set_condition(self, name: str, condition: Condition) -> bool:
        """Apply a server's state as reported by control. Returns whether the server came up. Ignores a name that is not live."""
        if (server := self._servers.get(name)) is None:
            return False
        comes_up = condition is Condition.UP and server.condition is not Condition.UP
        server.condition = condition
        return comes_up

    def find(self, name: str) -> Server | None:
        """Return the live server of this name."""
        return self._servers.get(name)

    def take_progress(self) -> dict[str, Progress]:
        """Return the progress of each server whose responses were awaited since the last call."""
        return {name: progress for name, server in self._servers.items() if (progress := server.take_progress()) is not None}

    def expire(self) -> None:
        """Close expired idle connections, and end expired ejections."""
        for server in self._servers.values():
            server.expire()
        self._retired = [server for server in self._retired if server.in_flight]

    def with_movable_responses(self) -> list[Server]:
        """Return the servers, also removed ones, with responses that another server can continue."""
        return [server for server in (*self._servers.values(), *self._retired) if server.movable]

    def close(self) -> None:
        """Close every idle connection."""
        for server in self._servers.values():
            server.retire()


def live_servers(write_batch: WriteBatch | None = None, create: CreateServer = Server) -> closing[LiveServers]:
    """Return a context with a set of live servers, whose idle connections are closed on exit."""
    return closing(LiveServers(write_batch, create))
