"""Choose the request that is stopped at its server, so that a request of an earlier class gets its slot: preemption.

Reserved slots are kept free before an urgent request comes, and the engine's priority orders the requests inside it. This is for the case
that neither suffices. The rules: a request may be preempted while it has sent nothing to its client. The request that was sent last is
preempted, because the least work is lost. Its slot goes to the request for which it was stopped. It waits again, and keeps its time of
arrival, so its class ages; neither the size of the queue nor a deadline refuses it. It is charged for its prompt, like the request of a
client that disconnects. Classes that have aged are not preempted.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Protocol

from gateway.admission.shares import QueueShares


class RunningRequest(Protocol):
    """A request that may be preempted (``Attempt``)."""

    @property
    def sent_at(self) -> float:
        """When it was sent to its server."""

    def preemptible_for(self, tier: int, /) -> bool:
        """Return whether it has sent nothing to its client, and a request of this tier could have its slot."""

    def preempt(self) -> None:
        """Stop it at its server, which frees its slot. It is queued again."""


RunningRequests = dict[RunningRequest, str]
"""The requests of a model that may be preempted, and their classes."""


@contextmanager
def preemptible(running: RunningRequests, request: RunningRequest, class_name: str, gauge: AbstractContextManager[None]) -> Iterator[None]:
    """Make a request preemptible from its start to its end. Holds the gauge of its model's requests."""
    with gauge:
        running[request] = class_name
        try:
            yield
        finally:
            del running[request]


def preempted_for(class_name: str, running: RunningRequests, shares: QueueShares, aged: Set[str]) -> RunningRequest | None:
    """Return the request that is preempted for a request of this class; None if no such request runs."""
    if class_name not in shares.preempting:
        return None
    tier = shares.tiers[class_name]
    of_later = (each for each, other in running.items() if other not in aged and shares.may_preempt(class_name, other))
    return max((each for each in of_later if each.preemptible_for(tier)), key=attrgetter("sent_at"), default=None)
