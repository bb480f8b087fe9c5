"""``balance: least_busy``: the server with the fewest requests in flight for its weight."""

from __future__ import annotations

from upstream.balancing.policies.policy import C, Candidates, Policy, RequestFacts


class LeastBusy(Policy[C]):
    """Choose a server with the smallest load."""

    description = "a server with the fewest requests in flight for its `weight`"
    uses_idle_pool_evenly = True

    def choose(self, candidates: Candidates[C], request: RequestFacts) -> C:  # noqa: ARG002  only the load counts
        """Return a candidate with the smallest load."""
        return candidates.least_busy()
