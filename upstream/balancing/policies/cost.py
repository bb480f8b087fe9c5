"""``balance: cost``: the server on which the request costs the least time.

The cost of a request on a server is the sum of:

* **its backlog**: the time that the server still needs for the prompts that it was given before;
* **its uncached tokens** at the server's speed. The prefix index knows how much of the prompt the server has cached. On a server that
  computes prompts all the time they cost up to ``1 + BUSY`` times as much: they delay the requests after them, and their blocks evict
  others. On a server with time to spare, another copy of a popular prefix costs nothing;
* **its requests**, ``RUNNING`` for each, more ``CROWDED`` for each above ``FACTOR`` times its share, because every request in a batch makes
  the others slower. Up to ``FREE`` requests are never too many;
* **its KV cache**, if its running requests use nearly all of it;
* **its LoRA adapter**, if the server has not used it lately, and **its session**, if another server had its last request.

So a request goes where its prefix is cached, unless waiting there takes longer than computing it elsewhere. The rule: an unknown server is
compared with assumed values, and if nothing is known of the prompt, the least busy server of those with the same cost is chosen.

Several gateways in front of the same servers do not know each other's requests. The engines' metrics show how many requests belong to
others. In this case a prompt has a **home**: rendezvous hashing of its first block that few servers have. All gateways compute the same
home, and each assumes that the others sent the prefix there, as long as the responses confirm it. So the gateways do not store the same
prefixes on different servers.

In a large pool, only ``CONSIDERED`` servers are compared: those with the longest cached prefix, the least busy one and a few others in
turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from upstream.balancing.cost_model import BLOCK_BYTES, CostModel, Prompt
from upstream.balancing.policies.policy import C, Candidates, Policy, RequestFacts
from upstream.balancing.policies.prefix import Prefix
from upstream.settings import setting

BUSY = 4.0
RUNNING = 0.005
"""Seconds by which each running request delays a new one."""
CROWDED = 0.05
"""Seconds for each request of a server above ``FACTOR`` times the mean, and above ``FREE``."""
UNEVEN = 4.0
"""Seconds for each mean number of requests by which a server was above ``FACTOR`` times the mean for some time, because its prefixes are
popular."""
FULL = 0.5
"""Seconds that a request waits on a server whose KV cache is full, for a running request to end."""
FACTOR = 1.25
FREE = 4
OTHERS = 4 / 3
"""The assumed cached share of a prompt on its home, for each request of others among all requests; at most the whole prompt."""
FOUND = 1 / 3
"""The share of assumed tokens that must be cached. Below it less is assumed: others send other prompts, or events report their prompts."""
POPULAR = 4
"""A block that more than one of this many servers have is not the block that decides about the home."""
ADAPTER = 0.05
"""Seconds for a LoRA adapter that the server has not used lately, and may have to load."""
SESSION = 0.02
"""Seconds that the server of a session's last request is preferred by: it also has the generated tokens, which the index does not know."""
CONSIDERED = 32


@dataclass(frozen=True, slots=True)
class CostSettings:
    """The settings of the policy."""

    kv_cache_tokens: int | None = setting("tokens in each server's KV cache; default: from the engines' metrics", ge=1, lt=2**63)
    explain: bool = setting("explain each choice in the access log", default=False)


class Cost(Policy[C]):
    """Choose the server with the smallest cost. ``model`` keeps what was learned when the pool is replaced."""

    description = (
        "the server on which the request costs the least time: its waiting prompts, the tokens that it has not "
        "[cached](prefix-cache.md#route-by-cost), its speed"
    )
    requires = frozenset({"prompt"})
    settings = CostSettings
    uses_idle_pool_evenly = True

    def __init__(self, servers: Sequence[C], settings: CostSettings | None = None, model: CostModel | None = None) -> None:
        super().__init__(servers, settings)
        self.model = model or CostModel()
        self.model.set_servers(server.name for server in servers)
        self._by_name = {server.name: server for server in servers}
        self._explain = settings is not None and settings.explain
        self._choices = 0
        self._weight = sum(server.weight for server in servers)
        self._homes: Prefix[C] = Prefix(servers)

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
        adapter, session = self._owners(prompt.adapter), self._owners(prompt.session)
        now, pace, states = model.clock(), model.pace, model.servers
        per_token = 1 / model.bytes_per_token
        tokens, per_block = prompt.tokens or prompt.size * per_token, BLOCK_BYTES * per_token
        all_others = model.others(now)
        mean = (model.in_flight + all_others) / self._weight
        crowd, average = max(FREE, FACTOR * mean), max(model.recent.at(now, model.in_flight) / self._weight, FREE)
        home, expected = None, 0.0
        if all_others and prompt.keys:
            home = self._home(prompt, matched, candidates, reported)
            expected = min(OTHERS * all_others / (all_others + model.in_flight), 1.0) * min(model.found / FOUND, 1.0) * tokens
        lowest, best_cached = None, 0.0
        explained: list[tuple[str, float, float]] | None = [] if self._explain else None
        compared = (best, *considered) if home is None else (best, *considered, home)
        # A reload may have removed servers after this pool was made.
        for server in [server for server in compared if server.name in states]:
            name = server.name
            state = states[name]
            speed = state.seconds_per_token or pace
            cached = matched.get(name, 0) * per_block
            if reported is not None and name in reported:
                cached = max(cached, reported[name]) if name in incomplete else reported[name]
            uncached = tokens - (max(cached, expected) if server is home else cached)
            weight, compute = server.weight, uncached * speed
            if lowest is not None and explained is None and compute + RUNNING * state.in_flight / weight >= lowest:
                continue  # all other terms only add to this
            others, others_waiting = state.others(now)
            requests = (state.in_flight + others) / weight
            backlog = state.ready_at - now
            cost = compute * (1 + BUSY * min(state.utilization(now), 1.0)) + RUNNING * requests
            cost += backlog if backlog > 0.0 else state.waiting * speed  # what is overdue takes longer than expected
            cost += others_waiting * model.mean_uncached * speed + FULL * state.fullness(now)
            if (above := requests + 1 / weight - crowd) > 0.0:
                cost += CROWDED * above
            if (ratio := state.recent.at(now, state.in_flight) / weight / average - FACTOR) > 0.0:
                cost += UNEVEN * ratio
            if adapter is not None and name not in adapter:
                cost += ADAPTER
            if session is not None and name not in session:
                cost += SESSION
            if explained is not None:
                explained.append((name, cost, cached))
            if lowest is None or cost < lowest:
                best, lowest, best_cached = server, cost, cached
        if lowest is None:
            return best
        placement = model.start(best.name, prompt, best_cached)
        placement.assumed = expected if best is home else 0.0
        if explained is not None:
            placement.candidates = tuple(explained[1:])
        return best

    def _owners(self, key: int | None) -> Mapping[str, int] | None:
        """Return the servers that have used a session or an adapter lately; None for a request without one."""
        return None if key is None else self.model.index.matched((key,))

    def _home(self, prompt: Prompt, matched: dict[str, int], candidates: Candidates[C], reported: Mapping[str, float] | None) -> C | None:
        """Return the server on which all gateways expect a prompt that they do not know.

        Returns None if this server is down, or its events report what it has cached.
        """
        few = max(len(candidates.members) // POPULAR, 1)
        depth = sorted(matched.values(), reverse=True)[few] if len(matched) > few else 0
        home = self._homes.order(prompt.keys[min(depth, len(prompt.keys) - 1)])[0]
        is_reported = reported is not None and home.name in reported and home.name not in self.model.engines.incomplete
        return home if home in candidates and not is_reported else None

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
