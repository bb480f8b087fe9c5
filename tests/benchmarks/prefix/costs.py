"""``balance: cost`` as a chooser: the gateway's own code, with the feedback of requests, of the engines' load and of the caches' events.

The rule: nothing is decided here. Prompts are cut into the gateway's own blocks, and the clock of the cost model is the world's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from gateway.prompts.blocks import prompt_of
from tests.benchmarks.prefix.choosers import Chooser, InRotation, KnownServer
from tests.benchmarks.prefix.requests import Machine, Request
from tests.benchmarks.prefix.traces import BLOCK, Prompt, document
from upstream.balancing.cost_model import CostModel, EngineLoad
from upstream.balancing.cost_model import Prompt as PromptBlocks
from upstream.balancing.policies.cost import Cost
from upstream.balancing.policies.policy import RequestFacts

UNBOUNDED = 10**9
"""Tokens of a cache whose evictions are known from its events."""


@dataclass(frozen=True, slots=True)
class CutPrompt:
    """The keys of a prompt's blocks, and its size in bytes."""

    keys: tuple[int, ...]
    size: int


class Blocks:
    """The blocks of prompts. A prompt is cut once for all choosers and gateways that share this object."""

    def __init__(self) -> None:
        self._cut: dict[int, CutPrompt] = {}

    def of(self, prompt: Prompt) -> CutPrompt:
        """Return the blocks of a prompt, as the gateway cuts the request for it."""
        name = prompt.nodes[-1]
        cut = self._cut.get(name)
        if cut is None:
            steps = prompt_of(document(prompt.segments))
            while cut is None:
                try:
                    next(steps)
                except StopIteration as end:
                    cut = self._cut[name] = CutPrompt(tuple(end.value.keys), end.value.size)
        return cut


class ByCost(Chooser):
    """The policy of one gateway with one worker. ``events``: whether the gateway gets the events of the caches."""

    samples = True

    def __init__(self, machines: Sequence[Machine], blocks: Blocks, *, events: bool) -> None:
        self._now = 0.0
        self._blocks = blocks
        self._events = events
        self._model = CostModel(UNBOUNDED if events else None, clock=lambda: self._now)
        self._policy = Cost(machines, model=self._model)
        self._candidates = InRotation(machines)
        self._prompts: dict[Request, PromptBlocks] = {}
        self._sizes: dict[int, int] = {}  # blocks of each node

    def choose(self, request: Request, now: float) -> Machine:
        """Return the policy's choice."""
        self._now = now
        cut = self._blocks.of(request.prompt)
        prompt = self._prompts[request] = PromptBlocks(cut.keys, cut.size, stream=True)
        if self._events:
            prompt.tokens, prompt.token_keys = request.prompt.tokens, {BLOCK: [key for keys in keys_of(request.prompt) for key in keys]}
        return self._policy.choose(self._candidates, RequestFacts(prompt=prompt))

    def first_token(self, request: Request, machine: Machine, now: float) -> None:
        """Report the first bytes of the stream."""
        self._now = now
        self._prompts[request].responded()

    def finished(self, request: Request, machine: Machine, now: float) -> None:
        """Report the usage of the stream."""
        self._now = now
        placement = self._prompts.pop(request).placement
        assert placement is not None
        placement.finished(request.prompt.tokens, request.cached, 0 if self._events else request.completion.tokens)

    def sampled(self, machine: Machine, waiting: int, running: int, now: float) -> None:
        """Report the engine's metrics."""
        self._now = now
        self._model.engine_load(machine.name, EngineLoad(now, running, waiting))

    def stored(self, machine: Machine, prompt: Prompt) -> None:
        """Apply an event of a cache."""
        for node, keys in zip(prompt.nodes, keys_of(prompt), strict=True):
            self._sizes[node] = len(keys)
            self._apply(machine, inserted=keys)

    def evicted(self, machine: Machine, node: int, blocks: int) -> None:
        """Apply an event of a cache."""
        self._apply(machine, removed=block_keys(node, blocks, self._sizes[node]))

    def _apply(self, machine: Machine, removed: Sequence[int] = (), inserted: Sequence[int] = ()) -> None:
        as_bytes = [array("Q", keys).tobytes() for keys in (removed, inserted)]
        self._model.engines.apply(machine.name, BLOCK, complete=True, cleared=False, removed=as_bytes[0], inserted=as_bytes[1])


@cache
def block_keys(node: int, first: int, end: int) -> list[int]:
    """Return the keys of some blocks of a node, as events have them."""
    return [hash((node, number)) % 2**64 for number in range(first, end)]


def keys_of(prompt: Prompt) -> list[list[int]]:
    """Return the keys of the blocks of each node of a prompt."""
    return [block_keys(node, 0, segment.tokens // BLOCK) for node, segment in zip(prompt.nodes, prompt.segments, strict=True)]


def without_events(machines: Sequence[Machine], _: Sequence[KnownServer], *, blocks: Blocks) -> Chooser:
    """Return a chooser for a gateway that knows its own requests."""
    return ByCost(machines, blocks, events=False)


def with_events(machines: Sequence[Machine], _: Sequence[KnownServer], *, blocks: Blocks) -> Chooser:
    """Return a chooser for a gateway that gets the events of the caches."""
    return ByCost(machines, blocks, events=True)
