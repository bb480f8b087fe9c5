"""The service that requests get from a model's servers: its unit, and what the requests of a key usually need.

Service is a weighted number of tokens: the tokens of the prompt that were not cached, and those of the output. A queue is fair in service.
The rule: each token is charged once. A request that waited is charged by its own counts when it ends; everything else that a key has used
is found in the counters of its tokens, which all requests increase anyway, so a request that does not wait costs nothing more.

Pure, but for the counters, which are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from gateway.api.usage import Usage
from upstream.cells import Cells

_LEARNING = 0.1  # weight of a request against the earlier ones
_OUTPUT = 128.0  # tokens, before the first response
_PER_BYTE = 0.25  # tokens of a prompt per byte of its body, before the first response


class Tokens(NamedTuple):
    """The tokens of one or more requests that servers computed."""

    prompt: float = 0.0
    output: float = 0.0

    @classmethod
    def of(cls, usage: Usage) -> Tokens:
        """Return the tokens of a usage: those of the prompt without the cached ones."""
        return cls(usage.prompt - usage.cached, usage.completion)


NO_TOKENS = Tokens()


class ServiceWeights(NamedTuple):
    """The service of one uncached token of a prompt, and of one token of an output."""

    prompt: float = 1.0
    completion: float = 4.0

    def service(self, tokens: Tokens) -> float:
        """Return the service of some tokens."""
        return self.prompt * tokens.prompt + self.completion * tokens.output


class TokenCells(NamedTuple):
    """The counters of a key's tokens for one model."""

    prompt: Cells
    completion: Cells
    cached: Cells


class UsualUse:
    """The usual use of a request of a key, or of all keys: moving means. ``general``: assumed before the first request."""

    __slots__ = ("_general", "_output", "_per_byte")

    def __init__(self, general: UsualUse | None = None) -> None:
        self._general = general
        self._output = self._per_byte = -1.0  # unknown

    @property
    def output(self) -> float:
        """Tokens of an output."""
        if self._output >= 0.0:
            return self._output
        return _OUTPUT if self._general is None else self._general.output

    @property
    def per_byte(self) -> float:
        """Uncached tokens of a prompt per byte of its body."""
        if self._per_byte >= 0.0:
            return self._per_byte
        return _PER_BYTE if self._general is None else self._general.per_byte

    def estimate(self, size: int, most: float = inf) -> Tokens:
        """Estimate a request. ``size``: bytes of its body. ``most``: tokens that its output may have."""
        return Tokens(self.per_byte * size, min(self.output, most))

    def learn(self, tokens: Tokens, size: int) -> None:
        """Learn from a request with a body of ``size`` bytes that has ended."""
        per_byte = tokens.prompt / max(size, 1)
        self._output = tokens.output if self._output < 0.0 else self._output + _LEARNING * (tokens.output - self._output)
        self._per_byte = per_byte if self._per_byte < 0.0 else self._per_byte + _LEARNING * (per_byte - self._per_byte)


class SeenTokens:
    """Counters of tokens, and what of them has been seen."""

    __slots__ = ("_cells", "_seen")

    def __init__(self, cells: Sequence[TokenCells]) -> None:
        self._cells = tuple(cells)
        self._seen = self._counted()

    def _counted(self) -> tuple[float, float]:
        prompt = output = 0.0
        for prompts, completions, cached in self._cells:
            prompt += prompts[0] - cached[0]
            output += completions[0]
        return prompt, output

    def take_unseen(self) -> Tokens:
        """Return the tokens that were counted since the last call, without those of ``note``."""
        before, now = self._seen, self._counted()
        if now == before:
            return NO_TOKENS
        self._seen = now
        return Tokens(now[0] - before[0], now[1] - before[1])

    def note(self, tokens: Tokens) -> None:
        """Note the tokens of a request that is charged on its own. They are counted now or soon."""
        prompt, output = self._seen
        self._seen = prompt + tokens.prompt, output + tokens.output

    def use(self, cells: Sequence[TokenCells]) -> None:
        """Read these counters from now on: a reload may have added an adapter. The earlier counts of new ones are not unseen."""
        unseen = self.take_unseen()
        self._cells = tuple(cells)
        prompt, output = self._counted()
        self._seen = prompt - unseen.prompt, output - unseen.output

    def add(self, cells: Sequence[TokenCells]) -> None:
        """Read also those that have been created since. All that they have counted is unseen."""
        known = {id(each.cached) for each in self._cells}
        self._cells += tuple(each for each in cells if id(each.cached) not in known)


class KeyUse:
    """The use that one key makes of a model and its adapters: in this worker, in the others, and usually."""

    __slots__ = ("own", "peers", "usual")

    def __init__(self, own: Sequence[TokenCells], peers: Sequence[TokenCells], general: UsualUse) -> None:
        self.own = SeenTokens(own)
        self.peers = SeenTokens(peers)
        self.usual = UsualUse(general)
