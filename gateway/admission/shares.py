"""The flows that a request belongs to in a queue: its class, its team, its key, and its end user, each with a weight.

The rule: a client may move its request to a later class, never to an earlier one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from gateway.admission.fair_queue import Share
from gateway.snapshot.snapshot import DEFAULT_CLASS, Key, QueueClass, Snapshot


@dataclass(frozen=True, slots=True)
class RequestFlows:
    """The names of a request's class, team and key, for metrics, and the path to its leaf. ``key_at``: the index of the key in the path."""

    class_name: str
    team: str
    key: str
    path: tuple[Share, ...]
    key_at: int


class QueueShares:
    """The shares of a snapshot."""

    def __init__(
        self, classes: Sequence[QueueClass] = (), teams: Mapping[str, float] | None = None, keys: Mapping[str, float] | None = None
    ) -> None:
        """``teams`` and ``keys``: weights by ID, 1 if missing.

        A key has its own weight, but for the subjects of tokens. A key of the store has that of its team, too.
        """
        has_default = any(each.name == DEFAULT_CLASS for each in classes)
        self.classes = {each.name: each for each in (*classes, *(() if has_default else (QueueClass(DEFAULT_CLASS),)))}
        self.has_classes = bool(classes)
        self._order = list(self.classes)
        strict = [each.name for each in self.classes.values() if each.strict]
        self.ranks = {name: strict.index(name) if name in strict else len(strict) for name in self.classes}
        """The rank of each class: the strict ones by order, and after them all others together."""
        reserving = [number for number, each in enumerate(self.classes.values()) if each.reserved_slots]
        self.tiers = {name: sum(each < number for each in reserving) for number, name in enumerate(self.classes)}
        """The number of classes before each class that have reserved slots."""
        self.preempting = frozenset(each.name for each in self.classes.values() if each.preempts)
        """The classes whose requests may preempt those of later classes."""
        self._teams, self._keys = teams or {}, keys or {}

    @classmethod
    def of(cls, snapshot: Snapshot) -> QueueShares:
        """Return the shares of a snapshot."""
        return cls(snapshot.classes, snapshot.team_weights, {key.id: key.weight for key in snapshot.keys})

    def flows_of(self, key: Key, user: str | None, lowered_to: str | None, aged: Set[str] = frozenset()) -> RequestFlows:
        """Return the flows of a request. ``aged``: classes whose requests have waited so long that they count as strict."""
        name, owner = self.class_of(key, lowered_to), key.entry or key.id
        path: list[Share] = []
        if self.has_classes:
            path.append(self.class_share(name, aged))
        if key.team is not None:
            path.append(Share(f"team {key.team}", self._teams.get(key.team, key.team_weight)))
        path.append(Share(f"key {owner}", key.weight if key.entry is None else self._keys.get(owner, 1.0)))
        key_at = len(path) - 1
        if user is not None:
            path.append(Share(user, key.weight if key.entry is not None else 1.0))
        return RequestFlows(name, key.team or "", owner, tuple(path), key_at)

    def names_above(self, class_name: str, team: str) -> list[str]:
        """Return the names of the flows above a key: those of its class and its team, as far as it has them."""
        return [f"class {class_name}"] * self.has_classes + [f"team {team}"] * bool(team)

    def key_share(self, key: str) -> Share:
        """Return the share of a key of which no request is known."""
        return Share(f"key {key}", self._keys.get(key, 1.0))

    def class_share(self, name: str, aged: Set[str]) -> Share:
        """Return the share of a class."""
        return Share(f"class {name}", self.classes[name].weight, 0 if name in aged else self.ranks[name], self.tiers[name])

    def may_preempt(self, name: str, other: str) -> bool:
        """Return whether requests of a class may preempt those of another one."""
        return name in self.preempting and other in self.classes and self._order.index(name) < self._order.index(other)

    def class_of(self, key: Key, lowered_to: str | None) -> str:
        """Return the class of a request."""
        own = DEFAULT_CLASS if key.queue_class is None or key.queue_class not in self.classes else key.queue_class
        if lowered_to is not None and lowered_to in self.classes and self._order.index(lowered_to) > self._order.index(own):
            return lowered_to
        return own
