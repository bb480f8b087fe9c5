"""A worker's knowledge about the caches, the speed and the work of a model's servers.

``CostModel`` lives as long as its model is configured with a policy that uses it, while pools come and go with snapshots. The rule:
observations and decisions are separate. Everything here observes; ``policies/cost.py`` decides. Costs are in seconds and sizes in bytes of
the canonical prompt (``gateway/prompts/blocks.py``), which ``bytes_per_token`` converts to tokens. Pure: the clock is given.

The model of a server: it computes prompts one after the other, at a speed that is learned from the time to the first token of streams. The
time that it still needs for the prompts before a new one is its backlog.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from math import exp
from time import monotonic
from typing import Protocol

from upstream.balancing.engine_caches import EngineCaches
from upstream.balancing.prefix_index import DEFAULT_CAPACITY, PrefixIndex

BLOCK_BYTES = 512
"""Bytes of the canonical prompt in one block: about 128 tokens."""
BYTES_PER_TOKEN = 4.0
"""Before the first response: about the ratio of English text in most tokenizers."""
SECONDS_PER_TOKEN = 1 / 8000
"""Before the first stream: a model of medium size on one current GPU computes about 8,000 tokens of prompts in a second."""
AVERAGE = 20.0
"""Seconds over which the mean requests in flight of a server are taken."""
WINDOW = 10.0
"""Seconds over which the utilization of a server is measured."""
DELAY = 0.05
"""Seconds by which an engine's own metrics may be late: about one step of the engine."""
ALMOST_FULL = 0.9
"""Share of a KV cache that running requests may use without delay: beyond it, vLLM soon lets requests wait, or preempts them."""
LOAD_LIFETIME = 5.0
"""Seconds after which a sample of an engine's load no longer counts. Its weight falls linearly until then."""
_LEAST_WORK = 128.0  # tokens that an observation of a server's speed must have: below that, other work decides the time
_MEMORY = 0.9  # weight of the earlier observations against the next one
_SLOWER = 1.02  # the most by which an observation counts as slower than the known speed if unknown prompts may have delayed it
_FIRST = 4  # observations that prompts of others may have delayed, of which the fastest is the first known speed
_OTHERS = 0.25  # requests of others for each one of this gateway above which their prompts delay its own
_FIRST_FOUND = 0.15  # before the first responses: others may send the same prefixes, or not
_FOUND = 0.05  # weight of the next observation against the earlier ones
_LEAST_CAPACITY = 64  # blocks
_CHANGES = 256  # of the requests in flight that are known afterwards


@dataclass(slots=True, eq=False)
class Prompt:
    """The prompt of one request, as far as the choice of a server depends on it, and where it was placed.

    ``keys``: of its blocks; they include the adapter and the salt. ``size``: bytes. ``session``: a key of its session. ``adapter``: a key
    of its LoRA adapter. ``tokens``, ``token_keys``: its token IDs' number, and the keys of their blocks by block size, if they are known.
    """

    keys: Sequence[int]
    size: int
    _: KW_ONLY
    stream: bool = False
    session: int | None = None
    adapter: int | None = None
    tokens: int = 0
    token_keys: Mapping[int, Sequence[int]] | None = None
    placement: Placement | None = None

    def responded(self) -> None:
        """Observe the first bytes of the response."""
        if self.placement is not None:
            self.placement.responded()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's own metrics: running and waiting requests, and the used share of its KV cache.

    ``time``: of the monotonic clock, before they were requested.
    """

    time: float
    running: float
    waiting: float
    kv_usage: float = 0.0


@dataclass(slots=True, eq=False)
class RecentMean:
    """The mean of a number over the last seconds. Earlier values fade with the time constant ``AVERAGE``."""

    _mean: float = 0.0
    _time: float = 0.0

    def at(self, now: float, value: float) -> float:
        """Return the mean; ``value``: since the last change."""
        return value + (self._mean - value) * exp((self._time - now) / AVERAGE)

    def change(self, now: float, value: float) -> None:
        """Note that the number changes; ``value``: until now."""
        self._mean, self._time = self.at(now, value), now


@dataclass(slots=True, eq=False)
class ServerCost:
    """The learned speed and the known work of one server."""

    ready_at: float = 0.0
    """When it will have computed the prompts that it has."""
    placed: float = 0.0
    """Tokens that it was given to compute since the start."""
    waiting: float = 0.0
    """Tokens of this worker's streams that have not begun to respond."""
    in_flight: int = 0
    """Requests of all workers of this gateway."""
    recent: RecentMean = field(default_factory=RecentMean)
    """Of ``in_flight`` and the requests of others."""
    foreign: tuple[float, float] = (0.0, 0.0)
    """Requests that the engine had from others when its load was sampled: all of them, and the waiting ones."""
    load_at: float = 0.0
    """When ``foreign`` and ``kv_usage`` were sampled; 0 before the first time."""
    kv_usage: float = 0.0
    """The share of its KV cache that its running requests use."""
    peer_placed_at: float = 0.0
    """When another process has last reported a request to it; 0 before the first one."""
    responded_at: float = 0.0
    """When the last stream of this worker began to respond."""
    responded_goal: float = 0.0
    """``placed`` when it was placed, itself included."""
    seconds_per_token: float | None = None
    """For a prompt, learned; None if unknown."""
    capacity: float = 0.0
    """Blocks that its cache is assumed to hold; fewer than ``most`` after evictions that were not predicted."""
    most: int = 0
    """Blocks of its cache."""
    _changes: deque[tuple[float, int]] = field(
        default_factory=partial(deque, maxlen=_CHANGES)
    )  # when in_flight changed, and its value before
    _delayed: list[float] = field(default_factory=list)  # seconds per token while the speed is unknown, at most _FIRST
    _tokens: float = 0.0
    _seconds: float = 0.0
    _work: float = 0.0  # seconds of prompts; the share of earlier ones falls by 1/e in WINDOW
    _work_at: float = 0.0

    def count(self, requests: int, now: float) -> None:
        """Count requests that start, or that end with a negative number."""
        self.recent.change(now, self.with_others(now))
        self._changes.append((now, self.in_flight))
        self.in_flight += requests

    def with_others(self, now: float) -> float:
        """Return its requests in flight, with those of others as they were sampled."""
        return self.in_flight + (self.foreign[0] if self.load_at and now - self.load_at < LOAD_LIFETIME else 0.0)

    def most_in_flight(self, since: float) -> int:
        """Return the largest number of requests that were in flight at one time since then."""
        most = self.in_flight
        for time, before in reversed(self._changes):
            if time < since:
                break
            most = max(most, before)
        return most

    def add_work(self, seconds: float, now: float) -> None:
        """Count prompts that take so many seconds to compute."""
        self.ready_at = max(self.ready_at, now) + seconds
        self._work = self._work * exp((self._work_at - now) / WINDOW) + seconds
        self._work_at = now

    def utilization(self, now: float) -> float:
        """Return the share of the last seconds that the server needed for prompts. Prompts of others count like those of this gateway."""
        own = self._work * exp((self._work_at - now) / WINDOW) / WINDOW
        others = self.others(now)[0]
        return own * (1 + others / self.in_flight) if others and self.in_flight else own

    def fullness(self, now: float) -> float:
        """Return how full the KV cache is, from 0 (``ALMOST_FULL`` or less) to 1. An old sample counts for less."""
        if self.kv_usage <= ALMOST_FULL or not self.load_at:
            return 0.0
        return (self.kv_usage - ALMOST_FULL) / (1 - ALMOST_FULL) * max(1.0 - (now - self.load_at) / LOAD_LIFETIME, 0.0)

    def others(self, now: float) -> tuple[float, float]:
        """Return the requests of others, and how many of them wait. An old sample counts for less."""
        if not self.load_at:
            return 0.0, 0.0
        freshness = max(1.0 - (now - self.load_at) / LOAD_LIFETIME, 0.0)
        return self.foreign[0] * freshness, self.foreign[1] * freshness

    def learn(self, tokens: float, seconds: float, *, is_shared: bool = False) -> None:
        """Learn from prompts of ``tokens`` tokens that the server computed in ``seconds`` seconds.

        ``is_shared``: it may have computed prompts of others in this time. Then slow observations count little: otherwise the server would
        seem slower the more others use it. The first one does not count alone: a server that seems slow gets few requests, so the error
        would last. Prompts of others only delay, so the fastest of a few observations is closest to the server's speed.
        """
        if is_shared:
            if self.seconds_per_token is None:
                self._delayed.append(seconds / tokens)
                if len(self._delayed) < _FIRST:
                    return
                seconds = min(self._delayed) * tokens
            else:
                seconds = min(seconds, _SLOWER * self.seconds_per_token * tokens)
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self.seconds_per_token = self._seconds / self._tokens


class Placement:
    """One request on the server that was chosen for it.

    ``predicted``: its tokens that should be cached. ``uncached``: the tokens that the server should have to compute.
    """

    __slots__ = (
        "_before", "_goal", "_is_shared", "_model", "_placed_at", "_prompt", "_responded", "_seconds", "_state", "_was_busy", "assumed",
        "candidates", "predicted", "server", "uncached",
    )  # fmt: skip

    def __init__(
        self, model: CostModel, server: str, prompt: Prompt, predicted: float, uncached: float, now: float, was_busy: bool
    ) -> None:
        state = self._state = model.servers[server]
        self._model = model
        self._prompt = prompt
        self._placed_at = now
        self._responded = False
        self.server = server
        self.predicted = predicted
        self.uncached = uncached
        self.assumed = 0.0
        """Tokens that may be cached because others sent the same prefix; more than ``predicted`` if the request was placed for them."""
        self.candidates: tuple[tuple[str, float, float], ...] = ()
        """Name, cost and cached tokens of each candidate, if the choice is to be explained."""
        if prompt.stream:
            state.waiting += uncached
        self._goal = state.placed
        self._was_busy = was_busy
        self._before = 0.0
        self._is_shared = False
        self._seconds = 0.0

    def responded(self) -> None:
        """Observe the first bytes of the response. The first bytes of a stream mean that the server has computed its prompt."""
        self._responded = True
        state, model = self._state, self._model
        now = model.clock()
        # Only the prompts that were placed later are still to be computed.
        ready_at = now + (state.placed - self._goal) * (state.seconds_per_token or model.pace)
        if not self._prompt.stream:
            state.ready_at = min(state.ready_at, ready_at)  # it was computed before, and the response took longer
        else:
            state.ready_at = ready_at
            state.waiting = max(state.waiting - self.uncached, 0.0)
            # The server computed this prompt since it had computed the one before, or since it got this one.
            self._seconds = now - max(self._placed_at, state.responded_at)
            self._is_shared = state.others(now)[0] > _OTHERS * state.in_flight
            if state.responded_at > self._placed_at:  # and those of other workers that were placed between the two
                self._before = max(self._goal - self.uncached - state.responded_goal, 0.0)
            elif self._was_busy:
                self._seconds = 0.0
            elif state.peer_placed_at and now - state.peer_placed_at < WINDOW:
                self._is_shared = True  # the prompt of another worker may be reported too late
            state.responded_at, state.responded_goal = now, self._goal

    def finished(self, prompt_tokens: int = 0, cached_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Observe the end. The arguments are the server's own counts, 0 if it reported none."""
        state, model, prompt = self._state, self._model, self._prompt
        if prompt.stream and not self._responded:
            state.waiting = max(state.waiting - self.uncached, 0.0)
        prompt.placement = None
        model.finish(self.server, prompt.keys, completion_tokens)
        if prompt_tokens:
            model.learn_size(prompt.size, prompt_tokens)
            if prompt.tokens:
                model.engines.verify(prompt.tokens, prompt_tokens)
            reported = model.correct(self.server, self.predicted, cached_tokens)
            if reported and self.assumed > 2 * self.predicted:  # of a prompt that is known, the rest is often new to all gateways
                model.learn_found((cached_tokens - self.predicted) / (self.assumed - self.predicted))
            computed = prompt_tokens - cached_tokens if reported else self.uncached
            if self._seconds > 0.0 and computed >= _LEAST_WORK:
                state.learn(computed + self._before, self._seconds, is_shared=self._is_shared)
                model.update_pace()


class Peers(Protocol):
    """The other workers, which learn of this worker's requests."""

    def catch_up(self) -> None:
        """Apply what the other processes have reported."""

    def placed(self, server: str, keys: Sequence[int], uncached: float) -> None:
        """Report that a prompt was sent to a server."""

    def finished(self, server: str, keys: Sequence[int], generated: int) -> None:
        """Report the end of a request, and the tokens of its completion."""


class CostModel:
    """The knowledge about the servers of one model.

    ``kv_cache_tokens``: the size of each server's cache, if the engines do not report it. ``peers`` are notified of this worker's requests.
    """

    def __init__(self, kv_cache_tokens: int | None = None, clock: Callable[[], float] = monotonic, peers: Peers | None = None) -> None:
        self.clock = clock
        self.index = PrefixIndex()
        self.engines = EngineCaches()
        self.servers: dict[str, ServerCost] = {}
        self.bytes_per_token = BYTES_PER_TOKEN
        self.pace = SECONDS_PER_TOKEN
        """Seconds for a token of a prompt, on a server whose speed is unknown: as on the fastest known one."""
        self.mean_uncached = 0.0
        """Mean tokens that a placed request had to compute."""
        self.in_flight = 0
        """Requests of this gateway on all servers."""
        self.recent = RecentMean()
        """Of ``in_flight`` and the requests of others."""
        self.found = _FIRST_FOUND
        """The share of the assumed tokens that were cached, when a request was placed for what others had sent."""
        self._foreign = 0.0
        self._load_at = 0.0
        self.peers = peers
        self._is_configured = kv_cache_tokens is not None
        self._default_capacity = DEFAULT_CAPACITY if kv_cache_tokens is None else blocks_of(kv_cache_tokens)
        self._bytes = self._tokens = 0.0
        self._reporting: set[str] = set()
        self._generated = 0

    def set_servers(self, names: Iterable[str]) -> None:
        """Know these servers and no others. The knowledge about the servers that stay is not lost."""
        wanted = dict.fromkeys(names)
        for name in [name for name in self.servers if name not in wanted]:
            removed = self.servers.pop(name)
            now = self.clock()
            self.recent.change(now, self.in_flight + self.others(now))
            self.in_flight -= removed.in_flight
            self._foreign -= removed.foreign[0]
            self._reporting.discard(name)
            self.index.remove_server(name)
        self.engines.set_servers(wanted)
        for name in wanted:
            if name not in self.servers:
                self.servers[name] = ServerCost()
                self._set_most(name, self._default_capacity)

    def set_cache_size(self, name: str, tokens: int) -> None:
        """Set the size of a server's cache, as its engine reports it. A configured size has precedence."""
        if not self._is_configured and name in self.servers:
            self._set_most(name, blocks_of(tokens))

    def _set_most(self, name: str, blocks: int) -> None:
        server = self.servers[name]
        if server.most != blocks:
            server.most = server.capacity = blocks
            self.index.add_server(name, blocks)

    def update_pace(self) -> None:
        """Update the speed that is assumed of a server without observations."""
        known = (server.seconds_per_token for server in self.servers.values() if server.seconds_per_token is not None)
        self.pace = min(known, default=self.pace)

    def restarted(self, name: str) -> None:
        """Forget the cache of a server whose process is new, and the work of the earlier process."""
        if (server := self.servers.get(name)) is not None:
            self.index.clear(name)
            server.ready_at = server.waiting = 0.0

    # Own requests

    def start(self, name: str, prompt: Prompt, cached: float) -> Placement:
        """Observe that a request is sent to a server, which should have ``cached`` of its tokens."""
        tokens = prompt.tokens or prompt.size / self.bytes_per_token
        cached = min(cached, tokens)
        uncached, now = tokens - cached, self.clock()
        if (earlier := prompt.placement) is not None:  # the request is sent again
            earlier.finished()
        was_busy = self.servers[name].ready_at > now
        self._add(name, prompt.keys, uncached, now)
        if prompt.session is not None:
            self.index.insert(name, (prompt.session,))
        if prompt.adapter is not None:
            self.index.insert(name, (prompt.adapter,))
        if self.peers is not None:
            self.peers.placed(name, prompt.keys, uncached)
        self.mean_uncached += (uncached - self.mean_uncached) * (1 - _MEMORY)
        prompt.placement = placement = Placement(self, name, prompt, cached, uncached, now, was_busy)
        return placement

    def finish(self, name: str, keys: Sequence[int], generated: int) -> None:
        """Observe the end of an own request. ``generated``: tokens of its completion."""
        self.peer_finished(name, keys, generated)
        if self.peers is not None:
            self.peers.finished(name, keys, generated)

    def learn_size(self, size: int, tokens: int) -> None:
        """Learn how many bytes of a canonical prompt a token has."""
        self._bytes = _MEMORY * self._bytes + size
        self._tokens = _MEMORY * self._tokens + tokens
        self.bytes_per_token = max(self._bytes / self._tokens, 0.25)

    def correct(self, name: str, predicted: float, cached: int) -> bool:
        """Correct the size of a server's cache by what it had cached of a prompt. Returns whether the server reports cached tokens.

        If fewer tokens were cached than predicted, the others were evicted: the cache is smaller than assumed, or others use it too.
        """
        server = self.servers.get(name)
        if cached:
            self._reporting.add(name)
        if server is None or name not in self._reporting:  # vLLM reports 0 without --enable-prompt-tokens-details
            return False
        if predicted - cached > 2 * BLOCK_BYTES / self.bytes_per_token:
            capacity = max(min(server.capacity, len(self.index.blocks(name))) * 31 / 32, _LEAST_CAPACITY)
        else:
            capacity = min(server.capacity * 1.004 + 0.1, float(server.most))
        server.capacity = capacity
        self.index.add_server(name, int(capacity))
        return True

    def learn_found(self, share: float) -> None:
        """Learn whether servers have prefixes that others sent."""
        self.found += (min(max(share, 0.0), 1.0) - self.found) * _FOUND

    # Observations of others

    def peer_placed(self, name: str, keys: Sequence[int], uncached: float) -> None:
        """Observe that another worker sends a request to a server."""
        if (server := self.servers.get(name)) is not None:
            server.peer_placed_at = now = self.clock()
            self._add(name, keys, uncached, now)

    def peer_finished(self, name: str, keys: Sequence[int], generated: int) -> None:
        """Observe the end of a request of another worker. Until then its blocks were in use.

        ``generated``: tokens of its completion, which are in the cache, too. Their blocks have no keys, because what the next request of a
        conversation repeats of a completion is often another text.
        """
        if (server := self.servers.get(name)) is not None:
            self._count(server, -min(server.in_flight, 1), self.clock())
            blocks = int(generated * self.bytes_per_token / BLOCK_BYTES)
            self._generated += blocks
            self.index.insert(name, [*keys, *range(-self._generated, blocks - self._generated)])

    def peers_ended(self, name: str, count: int) -> None:
        """Observe that ``count`` requests of another worker ended with its process."""
        if (server := self.servers.get(name)) is not None:
            self._count(server, -min(server.in_flight, count), self.clock())

    def engine_load(self, name: str, load: EngineLoad) -> None:
        """Observe an engine's own metrics. Its requests beyond this gateway's belong to others, e.g. to another gateway.

        The metrics arrive late. So a request of this gateway that has ended since then may be among them.
        """
        if (server := self.servers.get(name)) is not None:
            foreign = max(load.running + load.waiting - server.most_in_flight(load.time - DELAY), 0.0)
            now = self.clock()
            server.recent.change(now, server.with_others(now))
            self.recent.change(now, self.in_flight + self.others(now))
            self._foreign += foreign - server.foreign[0]
            server.foreign = (foreign, min(foreign, load.waiting))
            server.load_at = self._load_at = load.time
            server.kv_usage = load.kv_usage

    def others(self, now: float) -> float:
        """Return the requests of others on all servers."""
        return self._foreign if self._load_at and now - self._load_at < LOAD_LIFETIME else 0.0

    def _count(self, server: ServerCost, requests: int, now: float) -> None:
        """Count requests that start, or that end with a negative number. An idle server has no backlog, whatever its assumed speed."""
        server.count(requests, now)
        self.recent.change(now, self.in_flight + self.others(now))
        self.in_flight += requests
        if not server.in_flight:
            server.ready_at = server.waiting = 0.0

    def _add(self, name: str, keys: Sequence[int], uncached: float, now: float) -> None:
        server = self.servers[name]
        server.placed += uncached
        self._count(server, 1, now)
        server.add_work(uncached * (server.seconds_per_token or self.pace), now)
        self.index.insert(name, keys)


def blocks_of(tokens: float) -> int:
    """Return how many blocks of this index a cache of so many tokens holds."""
    return max(int(tokens * BYTES_PER_TOKEN / BLOCK_BYTES), 1)
