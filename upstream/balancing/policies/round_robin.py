"""``balance: round_robin``: one server after the other, whatever their load and weight."""

from __future__ import annotations

from collections.abc import Sequence

from upstream.balancing.policies.policy import C, Candidates, Policy, RequestFacts


class RoundRobin(Policy[C]):
    """Choose the servers in rotation."""

    description = "the next server in rotation; load and `weight` have no effect"
    uses_idle_pool_evenly = True

    def __init__(self, servers: Sequence[C], settings: object = None) -> None:
        super().__init__(servers, settings)
        self._choices = 0

    def choose(self, candidates: Candidates[C], request: RequestFacts) -> C:  # noqa: ARG002  every request counts the same
        """Return the next candidate."""
        self._choices += 1
        servers = candidates.members
        return servers[self._choices % len(servers)]
