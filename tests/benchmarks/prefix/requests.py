"""One request of the simulation, and a server as a gateway sees it.

The rule: a gateway counts only its own requests in a machine. All other knowledge reaches it by the hooks of a chooser.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.prefix.traces import Prompt, Segment


@dataclass(eq=False)
class Machine:
    """A server, as one gateway sees it. ``number``: the same in all gateways."""

    name: str
    number: int = 0
    in_flight: int = 0
    weight: float = 1.0

    @property
    def load(self) -> float:
        return self.in_flight / self.weight


@dataclass(eq=False, slots=True)
class Request:
    """A request. ``arrived``: in seconds. ``cached``: tokens of the prompt that the server had cached, once it has begun the prompt."""

    prompt: Prompt
    completion: Segment
    arrived: float
    cached: int = 0
