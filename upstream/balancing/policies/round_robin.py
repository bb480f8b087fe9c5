"""``balance: round_robin``: one server after the other, whatever their load and weight."""

from __future__ import annotations

from collections.abc import Sequence

from upstream.balancing.policies.policy import C, Candidates, Policy, RequestFacts


class RoundRobin(Policy[C]):
    """Choose the servers in rotation."""

    def __init__(self, servers: Sequence[C]) -> None:
        super().__init__(servers)
        self._choices = 0

    def choose(self, candidates: Candidates[C], request: RequestFacts) -> C:  # noqa: ARG002  every request counts the same
        """Return the next candidate."""
        self._choices += 1
        servers = candidates.members
        return servers[self._choices % len(servers)]
