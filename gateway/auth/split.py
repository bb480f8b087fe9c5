"""Choose the model that serves a request for a name that several models share by weight. Pure.

The rule: the choice depends on the text that identifies the request, on the models and on their weights, and on nothing else. So all
workers, gateways and restarts choose the same model for the same text. If one weight changes, requests move only to or from its model, and
no more than necessary.

This is weighted rendezvous hashing: the hash of the text and of a model is a uniform number, from which follows an exponentially
distributed time with the model's weight as its rate. The model with the earliest time is chosen, so each model is chosen with a
probability in proportion to its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import log
from typing import Generic, TypeVar

T = TypeVar("T")
_VALUES = 2.0**64


class Split(Generic[T]):
    """The models of a split. ``targets`` are the ID, the value and the weight of each; those with a weight of 0 are never chosen.

    ``sticky`` is ``key`` or ``session`` if all requests of one go to the same model. None: each request is drawn.
    """

    __slots__ = ("_targets", "sticky")

    def __init__(self, targets: Sequence[tuple[str, T, float]], sticky: str | None = None) -> None:
        self._targets = [(identity.encode(), target, weight) for identity, target, weight in targets if weight > 0]
        self.sticky = sticky

    def choose(self, text: str) -> T:
        """Return the target for a text. Equal texts have the same target."""
        hashed = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)

        def time(target: tuple[bytes, T, float]) -> float:
            own = hashed.copy()
            own.update(b"\0" + target[0])
            return -log((int.from_bytes(own.digest(), "big") + 1) / _VALUES) / target[2]

        return min(self._targets, key=time)[1]
