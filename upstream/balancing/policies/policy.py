"""The base of all balance policies: their view of servers and requests, and their one decision.

The rule: ``Policy.choose`` does no I/O and returns one of the candidates. In a policy for large pools, the cost must not grow with the
number of servers; a ranking keeps the candidates sorted by load.

A policy with settings has a frozen dataclass of them. Each field is a ``setting`` with its description and bounds such as ``ge``. The
section ``<policy>_policy`` of the configuration and its reference are derived from it. ``__post_init__`` raises ValueError, with a message
for the operator, for settings that contradict each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from upstream.balancing.cost_model import Prompt


class Candidate(Protocol):
    """A server, as far as a policy may know it."""

    in_flight: int

    @property
    def name(self) -> str:
        """The server's name. It stays the same for as long as the server's cache does."""

    @property
    def weight(self) -> float:
        """The server's share of requests relative to the other servers."""

    @property
    def load(self) -> float:
        """The requests in flight divided by the weight."""


C = TypeVar("C", bound=Candidate)
C_co = TypeVar("C_co", bound=Candidate, covariant=True)


class Candidates(Protocol[C_co]):
    """The servers that can take a request, at least one."""

    @property
    def members(self) -> Sequence[C_co]:
        """The servers, in the order of the configuration."""

    def __contains__(self, server: object, /) -> bool:
        """Return whether a server is among them, at a cost that does not grow with their number."""

    def least_busy(self) -> C_co:
        """Return a server with the smallest load. Servers with the same load take turns, so that an idle pool is used evenly."""


Fact = Literal["affinity_key", "prompt"]
"""A fact of a request that a policy can require. ``gateway/prompts/balancing_facts.py`` computes each of them."""


class RequestFacts(NamedTuple):
    """Facts of a request. A fact that the policy does not require keeps its default."""

    affinity_key: int | None = None
    """The same number for requests with the same prefix; None for a request without a text."""
    prompt: Prompt | None = None
    """The blocks of the prompt; None for a request that is not JSON."""
    tier: int = 0
    """How many reservations of a server's slots the request must leave free (``Server.reserved``)."""


NO_FACTS = RequestFacts()


@dataclass(frozen=True, slots=True)
class NoSettings:
    """The settings of a policy that has none."""


class Policy(ABC, Generic[C]):
    """A way to choose a server, for one pool. An instance lives as long as its pool and is called for each request."""

    description: ClassVar[str]
    """The server that gets a request, for the table in docs/configuration.md."""
    requires: ClassVar[frozenset[Fact]] = frozenset()
    """The facts that ``choose`` reads. Only these are computed."""
    settings: ClassVar[type[Any]] = NoSettings
    """The dataclass of its settings, each with a default."""
    uses_idle_pool_evenly: ClassVar[bool] = False
    """Whether each of n servers without requests gets one of the next n requests. A random policy cannot promise this."""

    def __init__(self, servers: Sequence[C], settings: Any = None) -> None:
        """Prepare for the servers of a pool, among them those that are down. ``settings``: the policy's settings; None: its defaults."""

    knows_caches: ClassVar[bool] = False
    """Whether ``cached_tokens`` returns what servers have cached."""

    def cached_tokens(self, _server: C, _prompt: Prompt, /) -> float:
        """Return the tokens of a prompt that a server has cached, as far as it is known."""
        return 0.0

    @abstractmethod
    def choose(self, candidates: Candidates[C], request: RequestFacts) -> C:
        """Return the candidate that gets the request."""
