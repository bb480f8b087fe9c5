"""``balance: cost``: the server on which the request costs the least time.

The cost of a request on a server is the sum of:

* **its backlog**: the time that the server still needs for the prompts that it was given before;
* **its uncached tokens** at the server's speed. The prefix index knows how much of the prompt the server has cached;
* **its running requests**, ``RUNNING`` for each, and what the engine's own metrics say about requests of others;
* **its LoRA adapter**, if the server has not used it lately, and **its session**, if another server had its last request.

So a request goes where its prefix is cached, unless waiting there takes longer than computing it elsewhere. The rule: an unknown server is
compared with assumed values, and if nothing is known of the prompt, the least busy server of those with the same cost is chosen.

In a large pool, only ``CONSIDERED`` servers are compared: those with the longest cached prefix, the least busy one and a few others in
turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from upstream.balancing.cost_model import BLOCK_BYTES, LOAD_LIFETIME, RUNNING, CostModel
from upstream.balancing.policies.policy import C, Candidates, Policy, RequestFacts

ADAPTER = 0.05
"""Seconds for a LoRA adapter that the server has not used lately, and may have to load."""
SESSION = 0.02
"""Seconds that the server of a session's last request is preferred by: it also has the generated tokens, which the index does not know."""
CONSIDERED = 32


class Cost(Policy[C]):
    """Choose the server with the smallest cost. ``model`` keeps what was learned when the pool is replaced."""

    requires = frozenset({"prompt"})

    def __init__(self, servers: Sequence[C], model: CostModel | None = None, *, explain: bool = False) -> None:
        super().__init__(servers)
        self.model = model or CostModel()
        self.model.set_servers(server.name for server in servers)
        self._by_name = {server.name: server for server in servers}
        self._explain = explain
        self._choices = 0

    def choose(self, candidates: Candidates[C], request: RequestFacts) -> C:
        """Return the candidate with the smallest cost, and note the request's placement on it."""
        best = candidates.least_busy()
        prompt = request.prompt
        if prompt is None:
            return best
        model = self.model
        if model.peers is not None:
            model.peers.catch_up()
        matched = model.index.matched(prompt.keys) if prompt.keys else {}
        reported = model.engines.cached_tokens(prompt.token_keys) if prompt.token_keys else None
        incomplete = model.engines.incomplete
        members = candidates.members
        considered: Iterable[C] = members if len(members) <= CONSIDERED else self._considered(candidates, matched)
        adapter = model.index.matched((prompt.adapter,)) if prompt.adapter is not None else None
        session = model.index.matched((prompt.session,)) if prompt.session is not None else None
        now, pace, states = model.clock(), model.pace, model.servers
        per_token = 1 / model.bytes_per_token
        tokens, per_block = prompt.tokens or prompt.size * per_token, BLOCK_BYTES * per_token
        lowest, best_cached = None, 0.0
        explained: list[tuple[str, float, float]] | None = [] if self._explain else None
        for server in (best, *considered):
            name = server.name
            state = states[name]
            speed = state.seconds_per_token or pace
            cached = matched.get(name, 0) * per_block
            if reported is not None and name in reported:
                cached = max(cached, reported[name]) if name in incomplete else reported[name]
            cost = (tokens - cached) * speed + RUNNING * state.in_flight / server.weight
            backlog = state.ready_at - now
            cost += backlog if backlog > 0.0 else state.waiting * speed  # what is overdue takes longer than expected
            if state.load_at:
                freshness = 1.0 - (now - state.load_at) / LOAD_LIFETIME
                if freshness > 0.0:
                    foreign, foreign_waiting = state.foreign
                    cost += freshness * (foreign_waiting * model.mean_uncached * speed + RUNNING * foreign / server.weight)
            if adapter is not None and name not in adapter:
                cost += ADAPTER
            if session is not None and name not in session:
                cost += SESSION
            if explained is not None:
                explained.append((name, cost, cached))
            if lowest is None or cost < lowest:
                best, lowest, best_cached = server, cost, cached
        placement = model.start(best.name, prompt, best_cached)
        if explained is not None:
            placement.candidates = tuple(explained[1:])
        return best

    def _considered(self, candidates: Candidates[C], matched: dict[str, int]) -> Iterable[C]:
        """Return the servers to compare in a large pool."""
        members, count = candidates.members, len(candidates.members)
        self._choices += 1
        first = self._choices * CONSIDERED // 4 % count
        others = [members[(first + step) % count] for step in range(CONSIDERED // 4)]
        if not matched:
            return others
        longest = sorted(matched, key=matched.__getitem__, reverse=True)
        if len(longest) > CONSIDERED:  # many servers have the start of this prompt: some of them in turn
            deepest = [name for name in longest if matched[name] == matched[longest[0]]]
            start = self._choices % len(deepest)
            longest = [*deepest[start:], *deepest[:start], *longest[len(deepest) :]]
        by_name = self._by_name
        known = (by_name[name] for name in longest if name in by_name)
        return [*others, *islice((server for server in known if server in candidates), CONSIDERED // 2)]
