"""The ways to choose a server: the gateway's own code, the idea of a tree of what was sent where, and an oracle.

``Tree`` is the idea of the cache-aware policy of SGLang's router, from which vLLM's comes, in our own words and with the default
numbers of vllm-router 0.1.17; it is not their code. ``Oracle`` knows what no gateway can know, and shows what is possible.

The rule: a chooser counts nothing that the world counts for it, and learns of other gateways by its hooks alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from gateway.prompts.prefix import affinity_key
from tests.benchmarks.prefix.cache import Cache
from tests.benchmarks.prefix.engines import PREFILL_SPEED, Engine
from tests.benchmarks.prefix.requests import Machine, Request
from tests.benchmarks.prefix.traces import Prompt, Segment, document
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.policy import Policy, RequestFacts
from upstream.balancing.ranking import CandidateList


class Feedback:
    """Reports to a gateway about its requests and servers. Times are in seconds."""

    samples: ClassVar[bool] = False
    """Whether ``sampled`` is to be called."""

    def first_token(self, request: Request, machine: Machine, now: float) -> None:
        """Report the first token of a request of this gateway."""

    def finished(self, request: Request, machine: Machine, now: float) -> None:
        """Report the last token of a request of this gateway; ``request.cached`` is in its usage."""

    def stored(self, machine: Machine, prompt: Prompt) -> None:
        """Report that a server has cached a prompt, of any gateway."""

    def evicted(self, machine: Machine, node: int, blocks: int) -> None:
        """Report that a server has evicted a part of a prompt: only so many blocks of its segment ``node`` are left."""

    def sampled(self, machine: Machine, waiting: int, running: int, now: float) -> None:
        """Report the requests of all gateways in a server, once a second."""


class Chooser(Feedback, ABC):
    """Chooses for one gateway, in the order of the requests."""

    @abstractmethod
    def choose(self, request: Request, now: float) -> Machine:
        """Return the server for a request."""


class KnownServer(Protocol):
    """A server as it is, which only an oracle can see."""

    cache: Cache
    engine: Engine
    in_flight: int


MakeChooser = Callable[[Sequence[Machine], Sequence[KnownServer]], Chooser]


@dataclass(slots=True)
class InRotation:
    """All machines. Those with the same load take turns."""

    members: Sequence[Machine]
    turn: int = 0

    def __contains__(self, server: object) -> bool:
        return server in self.members

    def least_busy(self) -> Machine:
        machine = CandidateList(self.members, self.turn).least_busy()
        self.turn += 1
        return machine


class ByPolicy(Chooser):
    """The gateway's own policy of this name, without feedback."""

    def __init__(self, balance: str, machines: Sequence[Machine]) -> None:
        self._policy: Policy[Machine] = POLICIES[balance](machines)
        self._candidates = InRotation(machines)

    def choose(self, request: Request, now: float) -> Machine:
        """Return the policy's choice."""
        key = affinity_key(document(request.prompt.segments)) if "affinity_key" in self._policy.requires else None
        return self._policy.choose(self._candidates, RequestFacts(key))


def by_policy(balance: str) -> MakeChooser:
    """Return the maker of choosers with this policy."""
    return lambda machines, _: ByPolicy(balance, machines)


THRESHOLD, APART, TIMES = 0.3, 64, 1.5
"""The share of a prompt's text that must be cached to count, and the difference and ratio of loads above which the least busy is chosen."""


@dataclass(eq=False)
class _Node:
    below: dict[int, _Node] = field(default_factory=dict)
    owners: dict[Machine, None] = field(default_factory=dict)  # the latest last


class Tree(Chooser):
    """Remembers every prompt by the server that got it. Its nodes are whole segments: ours share no part of one."""

    def __init__(self, machines: Sequence[Machine], _: Sequence[KnownServer]) -> None:
        self._machines = machines
        self._root = _Node()
        self._sizes = dict.fromkeys(machines, 0)

    def choose(self, request: Request, now: float) -> Machine:
        """Return the server with the longest known prefix, or the one with the smallest tree, or the least busy one."""
        chosen = self._choose(request.prompt.segments)
        node = self._root
        for segment in request.prompt.segments:
            node = node.below.setdefault(segment.number, _Node())
            if node.owners.pop(chosen, self) is self:
                self._sizes[chosen] += segment.tokens
            node.owners[chosen] = None
        return chosen

    def _choose(self, prompt: tuple[Segment, ...]) -> Machine:
        least, most = (by(self._machines, key=lambda machine: machine.in_flight) for by in (min, max))
        if most.in_flight - least.in_flight > APART and most.in_flight > least.in_flight * TIMES:
            return least
        owner, known = self._longest(prompt)
        if owner is not None and known > THRESHOLD * sum(segment.tokens for segment in prompt):
            return owner
        return min(self._machines, key=lambda machine: self._sizes[machine])

    def _longest(self, prompt: tuple[Segment, ...]) -> tuple[Machine | None, int]:
        node, known, owner = self._root, 0, None
        for segment in prompt:
            if segment.number not in node.below:
                break
            node = node.below[segment.number]
            known += segment.tokens
            owner = next(reversed(node.owners))
        return owner, known


IN_FLIGHT_COST = 0.002
"""Seconds that the oracle adds for each request in flight."""


class Oracle(Chooser):
    """Knows the caches and the work of all servers, and chooses the server with the earliest first token."""

    def __init__(self, machines: Sequence[Machine], servers: Sequence[KnownServer]) -> None:
        self._both = tuple(zip(machines, servers, strict=True))

    def choose(self, request: Request, now: float) -> Machine:
        """Return the server with the smallest cost."""
        prompt = request.prompt

        def cost(server: KnownServer) -> float:
            uncached = prompt.tokens - server.cache.known(prompt)
            return server.engine.backlog(now) + uncached / PREFILL_SPEED + IN_FLIGHT_COST * server.in_flight

        return min(self._both, key=lambda both: cost(both[1]))[0]


CHOOSERS: Mapping[str, MakeChooser] = {
    **{f"`{balance}`": by_policy(balance) for balance in ("round_robin", "least_busy", "prefix")},
    "tree": Tree,
    "oracle": Oracle,
}
