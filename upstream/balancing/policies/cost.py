"""``balance: cost``: the server on which the request costs the least time.

The cost of a request on a server is the sum of:

* **its backlog**: the time that the server still needs for the prompts that it was given before;
* **its uncached tokens** at the server's speed. The prefix index knows how much of the prompt the server has cached. On a server that
  computes prompts all the time they cost up to ``1 + BUSY`` times as much: they delay the requests after them, and their blocks evict
  others. On a server with time to spare, another copy of a popular prefix costs nothing;
* **its requests**, ``RUNNING`` for each, plus ``CROWDED`` for each above ``FACTOR`` times its share, because every request in a batch makes
  the others slower. Up to ``FREE`` requests are never too many;
* **its KV cache**, if its running requests use nearly all of it;
* **its LoRA adapter**, if the server has not used it lately, and **its session**, if another server had its last request.

So a request goes where its prefix is cached, unless waiting there takes longer than computing it elsewhere. The rule: an unknown server is
compared with assumed values, and if nothing is known of the prompt, the least busy server of those with the same cost is chosen.

Several gateways in front of the same servers do not know each other's requests. The engines' metrics show how many requests belong to
others. In this case a prompt has a **home**: rendezvous hashing of its first block that few servers have. All gateways compute the same
home, and each assumes that the others sent the prefix there, as long as the responses confirm it. On other servers, uncached tokens cost up
to ``1 + COPY`` times as much, because the other gateways would not use a copy there. So the gateways do not store the same prefixes on
different servers.

In a large pool, only ``CONSIDERED`` servers are compared: the servers with the longest cached prefix, the least busy server and, in
rotation, a few others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from upstream.balancing.cost_model import BLOCK_BYTES, CostModel, Prompt, ServerCost
from upstream.balancing.policies.policy import C, Candidate, Candidates, Policy, RequestFacts
from upstream.balancing.policies.prefix import Prefix
from upstream.settings import setting

BUSY = 4.0
COPY = 20.0
"""Instead of ``BUSY`` on the servers that are not the prompt's home, as far as prefixes of others are found."""
RUNNING = 0.005
"""Seconds by which each running request delays a new one."""
CROWDED = 0.05
"""Seconds for each request of a server above ``FACTOR`` times the mean, and above ``FREE``."""
UNEVEN = 4.0
"""Seconds for a server that was above ``FACTOR`` times the mean for some time, because its prefixes are popular. They are multiplied by
the excess, as a share of the mean."""
FULL = 0.5
"""Seconds that a request waits on a server whose KV cache is full, for a running request to end."""
FACTOR = 1.25
FREE = 4
OTHERS = 2.0
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


class _Terms:
    """The terms of the costs of one request, in seconds, and what they have in common. ``weight``: of all servers."""

    def __init__(self, model: CostModel, prompt: Prompt, weight: float) -> None:
        now = self._now = model.clock()
        per_token = 1 / model.bytes_per_token
        self._model = model
        self._per_block = BLOCK_BYTES * per_token
        self.tokens: float = prompt.tokens or prompt.size * per_token
        self.matched = model.index.matched(prompt.keys) if prompt.keys else {}
        """The blocks of the prompt that each server has cached, by its name."""
        self.reported = model.engines.cached_tokens(prompt.token_keys) if prompt.token_keys else None
        self.others = model.others(now)
        """The requests in flight that other gateways have sent."""
        self._crowd = max(FREE, FACTOR * (model.in_flight + self.others) / weight)
        self._average = max(model.recent.at(now, model.in_flight + self.others) / weight, FREE)
        self._adapter, self._session = self._owners(prompt.adapter), self._owners(prompt.session)

    def _owners(self, key: int | None) -> Mapping[str, int] | None:
        """Return the servers that have used a session or an adapter lately; None for a request without one."""
        return None if key is None else self._model.index.matched((key,))

    def is_reported(self, name: str) -> bool:
        """Return whether the events of a server report all that it has cached."""
        return self.reported is not None and name in self.reported and name not in self._model.engines.incomplete

    def cached(self, name: str) -> float:
        """Return the tokens of the prompt that a server has cached, as far as it is known."""
        indexed = self.matched.get(name, 0) * self._per_block
        if self.reported is None or name not in self.reported:
            return indexed
        return self.reported[name] if self.is_reported(name) else max(indexed, self.reported[name])

    def found(self) -> float:
        """Return how far this gateway relies on the others to use the same homes, from 0 to 1."""
        return min(self._model.found / FOUND, 1.0)

    def expected(self) -> float:
        """Return the tokens of the prompt that its home is assumed to have cached, because other gateways sent them there."""
        return min(OTHERS * self.others / (self.others + self._model.in_flight), 1.0) * self.found() * self.tokens

    def cost(self, server: Candidate, state: ServerCost, uncached: float, speed: float, busy: float) -> float:
        """Return the cost of the request on a server: it computes ``uncached`` tokens of its prompt, each in ``speed`` seconds.

        ``busy``: how many times more they cost on a server that computes prompts all the time.
        """
        others, others_waiting = state.others(self._now)
        requests = (state.in_flight + others) / server.weight
        return (
            uncached * speed * (1 + busy * min(state.utilization(self._now), 1.0))
            + self._backlog(state, others_waiting, speed)
            + RUNNING * requests
            + self._crowding(server, state, requests)
            + FULL * state.fullness(self._now)
            + self._loading(server.name)
        )

    def _backlog(self, state: ServerCost, others_waiting: float, speed: float) -> float:
        """Return the time that a server still needs for earlier prompts."""
        backlog = state.ready_at - self._now
        own = backlog if backlog > 0.0 else state.waiting * speed  # what is overdue takes longer than expected
        return own + others_waiting * self._model.mean_uncached * speed

    def _crowding(self, server: Candidate, state: ServerCost, requests: float) -> float:
        """Return the term of a server that has, or had for some time, more than its share of the requests."""
        above = requests + 1 / server.weight - self._crowd
        ratio = state.recent.at(self._now, state.with_others(self._now)) / server.weight / self._average - FACTOR
        return (CROWDED * above if above > 0.0 else 0.0) + (UNEVEN * ratio if ratio > 0.0 else 0.0)

    def _loading(self, name: str) -> float:
        """Return the time that a server needs for an adapter or a session that it has not used lately."""
        adapter = ADAPTER if self._adapter is not None and name not in self._adapter else 0.0
        return adapter + SESSION if self._session is not None and name not in self._session else adapter


class Cost(Policy[C]):
    """Choose the server with the smallest cost. ``model`` keeps what was learned when the pool is replaced."""

    description = (
        "the server on which the request costs the least time: its waiting prompts, the tokens that it has not "
        "[cached](prefix-cache.md#route-by-cost), its speed"
    )
    requires = frozenset({"prompt"})
    settings = CostSettings
    uses_idle_pool_evenly = True
    knows_caches = True

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
        prompt, model = request.prompt, self.model
        if prompt is None:
            return best
        if model.peers is not None:
            model.peers.catch_up()
        terms = _Terms(model, prompt, self._weight)
        home = self._home(prompt, terms, candidates) if terms.others and prompt.keys else None
        expected, copy = (0.0, BUSY) if home is None else (terms.expected(), BUSY + (COPY - BUSY) * terms.found())
        lowest, best_cached = inf, 0.0
        explained: list[tuple[str, float, float]] = []
        for server in (best, *self._considered(candidates, terms.matched), *(() if home is None else (home,))):
            state = model.servers.get(server.name)
            if state is None:
                continue  # a reload has removed it after this pool was made
            cached = terms.cached(server.name)
            uncached = terms.tokens - (max(cached, expected) if server is home else cached)
            speed = state.seconds_per_token or model.pace
            if not self._explain and uncached * speed + RUNNING * state.in_flight / server.weight >= lowest:
                continue  # all other terms only add to this
            cost = terms.cost(server, state, uncached, speed, BUSY if server is home else copy)
            if self._explain:
                explained.append((server.name, cost, cached))
            if cost < lowest:
                best, lowest, best_cached = server, cost, cached
        if lowest == inf:
            return best
        placement = model.start(best.name, prompt, best_cached)
        placement.assumed = expected if best is home else 0.0
        placement.candidates = tuple(explained[1:])
        return best

    def cached_tokens(self, server: C, prompt: Prompt, /) -> float:
        """Return what ``_Terms.cached`` does, for one server, and without reading the whole prompt."""
        model = self.model
        indexed = model.index.depth(server.name, prompt.keys) * BLOCK_BYTES / model.bytes_per_token
        reported = model.engines.cached_on(server.name, prompt.token_keys) if prompt.token_keys else None
        if reported is None:
            return indexed
        return max(indexed, reported) if server.name in model.engines.incomplete else reported

    def _home(self, prompt: Prompt, terms: _Terms, candidates: Candidates[C]) -> C | None:
        """Return the server on which all gateways expect a prompt that they do not know.

        Returns None if this server is down, or its events report what it has cached.
        """
        matched, few = terms.matched, max(len(candidates.members) // POPULAR, 1)
        depth = sorted(matched.values(), reverse=True)[few] if len(matched) > few else 0
        home = self._homes.order(prompt.keys[min(depth, len(prompt.keys) - 1)])[0]
        return home if home in candidates and not terms.is_reported(home.name) else None

    def _considered(self, candidates: Candidates[C], matched: Mapping[str, int]) -> Iterable[C]:
        """Return the servers to compare: of a large pool some."""
        members, count = candidates.members, len(candidates.members)
        if count <= CONSIDERED:
            return members
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
