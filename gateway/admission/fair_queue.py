"""Order waiting requests so that flows are served in proportion to their weights: hierarchical start-time fair queueing.

A flow is a node of a tree, for example a team and below it its keys; requests wait at the leaves. Each flow has a weight and a *tag*: the
service that it was charged, divided by its weight. At each level, the waiting flow with the smallest tag is next, and within a leaf the
request with the earliest deadline, which without deadlines has waited longest. A request is charged an estimate when it is dispatched. The
estimate is corrected while it runs and when it ends. The service that its flow gets without waiting is charged too.

With a deficit Q, a flow may be deferred for the sake of the servers' prefix caches: at each level, every waiting flow whose tag is at most
Q above the smallest may be next (``candidates``), and the caller chooses. This is D2LPM, deficit longest prefix match (Cao et al., 2025),
by tags instead of counters.

The rules:

- A flow keeps its debt, a tag above those of others, until it has been idle for ``MEMORY`` seconds.
- A flow that was idle gets no credit: its tag is raised to the virtual time of its parent. That is the tag of the last flow that was
  served, or that was deferred for it, without estimates: an estimate that was too high must not hold up a later flow.
- A pause of at most ``PAUSE`` seconds costs a flow nothing: its tag is not raised for the service that it missed.
- A request that did not run is charged nothing.
- A flow at the top whose tier may not be served now is passed over, and catches up later.
- Deadlines order the requests of one leaf only. Between flows they count for nothing, so the bound below holds with them. While a request
  with a booking waits, the queue lowers the tags of its flows until they are next (``lag``). That is a correction, and part of D: what is
  booked for one time is at most half of the service in the wait that deadlines allow.

The bound: while two sibling flows f and g have waiting requests, let d be the difference of their tags, d0 its value at the start, L the
largest charge of one dispatch, and D what the corrections of all requests of a flow that are in flight at one time can add up to. Then
d <= max(d0, Q + (L_f + D_f) / w_f + D_g / w_g), however long this lasts. So the service of the two, divided by their weights, differs by a
constant. With exact estimates, D is 0, and without a deficit, Q is 0. This is the form of the bound in VTC (Sheng et al., OSDI 2024), and
the deficit; the algorithm is that of Goyal, Vin and Cheng (1996) in a tree (Bennett and Zhang, 1997).

Pure: the clock is given, no I/O. Times are in seconds. The cost of a dispatch grows with the logarithm of the number of waiting flows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

PAUSE = 1.0
"""Seconds without a waiting request after which a flow gets no credit for the service that it missed."""
MEMORY = 60.0
"""Seconds without a request after which the debt of a flow is forgotten."""
CANDIDATES = 16
"""The leaves from which a caller may choose."""
MANY = 256
"""Flows below one flow, such as the end users of a key, from which those without a claim or a debt are forgotten early."""
_SPARE = 32  # entries of a heap that are out of date before it is rebuilt, besides as many as are up to date


class Share(NamedTuple):
    """One level of the path to a leaf: the name of a flow, unique below its parent, and its weight among its siblings.

    ``rank``: flows of a lower rank are served first. ``tier``: up to which tier ``pop`` must serve for a flow at the top to be served.
    """

    name: str
    weight: float
    rank: int = 0
    tier: int = 0


_UNNAMED = Share("", 1.0)
"""The leaf for requests whose path ends at a flow that has flows below it."""


class Flow(Generic[T]):
    """One node of the tree. Only a leaf has requests, each with the time since which it has waited."""

    __slots__ = (
        "_by_deadline", "_entries", "_entry", "_heap", "_many", "_older", "_past", "_queued_tag", "_rotated_at", "active_at", "backlog",
        "booked", "children", "in_flight", "name", "now", "parent", "pending", "rank", "requests", "tag", "tier", "waiting", "weight",
    )  # fmt: skip

    def __init__(self, name: str, weight: float, parent: Flow[T] | None) -> None:
        self.name = name
        self.weight = weight
        self.rank = self.tier = 0
        self.parent = parent
        self.tag = 0.0
        self.pending = 0.0
        """The part of its charges that is estimated: that of the requests in flight."""
        self.children: dict[str, Flow[T]] = {}
        self.requests: dict[T, float] = {}
        self.waiting = 0
        """The number of requests that wait below this flow."""
        self.in_flight = 0
        """The number of requests of a leaf that were dispatched and have not ended."""
        self.backlog = 0.0
        """The service that its waiting requests will probably get, as far as ``expect`` was called for them."""
        self.booked = 0
        """The number of bookings of a leaf. A flow with bookings is not forgotten."""
        self.active_at = -inf
        """When it last had a waiting request, or was charged."""
        self.now = 0.0
        """The virtual time of its children: the largest tag at which a child was served."""
        self._many = MANY  # the number of its children at which ``forget_some`` looks at them again
        self._entry = 0  # the number of its valid entry in the heap of its parent
        self._queued_tag = 0.0  # the tag of that entry: at most its own
        self._entries = 0  # the number of entries that its own heap has had
        self._heap: list[tuple[int, float, int, Flow[T]]] = []  # its waiting children by rank and tag, and entries that are out of date
        self._by_deadline: list[tuple[float, int, T]] = []  # a heap of its requests if any has a deadline, and of removed ones
        self._past = self._older = 0.0  # the virtual time at the last two rotations
        self._rotated_at = -inf

    @property
    def is_used(self) -> bool:
        """Whether a request, a booking or another flow needs it."""
        return bool(self.waiting or self.children or self.in_flight or self.booked)

    @property
    def settled(self) -> float:
        """The tag without estimates."""
        return self.tag - self.pending / self.weight

    def next_child(self, tier: float = inf) -> Flow[T] | None:
        """Return the waiting child that is next: the one with the smallest tag among those of the lowest rank, up to a tier.

        None if no such child waits.
        """
        heap = self._heap
        while heap:
            _, tag, entry, child = heap[0]
            if entry != child._entry or not child.waiting:
                heappop(heap)
            elif tag < child.tag:
                heapreplace(heap, child._new_entry(self))
            else:
                return child if child.tier <= tier else self._next_up_to(tier)
        return None

    def near(self, deficit: float, most: int) -> list[Flow[T]]:
        """Return the waiting child that is next, and at most as many as ``most`` in all of its rank whose tags are within a deficit.

        They are found among the first entries of the heap, which are some of the smallest, so the cost does not grow with the children.
        """
        if (least := self.next_child()) is None:
            return []
        if most <= 1:
            return [least]
        limit, rank, first = least.tag + deficit, least.rank, self._heap[:most]
        found = [
            child for _, _, entry, child in first if child.tag <= limit and entry == child._entry and child.waiting and child.rank == rank
        ]
        if 2 * len(found) < len(first):  # this removes entries that are out of date from the front
            self._rebuild()
        return found

    def _rebuild(self) -> None:
        """Remove the entries of the heap that are out of date, and correct the others."""
        valid = (entry for entry in self._heap if entry[2] == entry[3]._entry and entry[3].waiting)
        self._heap = [entry if entry[1] == entry[3].tag else entry[3]._new_entry(self) for entry in valid]
        heapify(self._heap)

    def _next_up_to(self, tier: float) -> Flow[T] | None:
        """Return what ``next_child`` does, without the heap: only classes have tiers, and they are few."""
        waiting = (child for child in self.children.values() if child.waiting and child.tier <= tier)
        return min(waiting, key=lambda child: (child.rank, child.tag, child._entry), default=None)

    def earlier(self, now: float) -> float:
        """Return the virtual time between one and two times ``PAUSE`` ago."""
        since = now - self._rotated_at
        if since >= PAUSE:
            self._older = self._past if since < 2 * PAUSE else self.now
            self._past, self._rotated_at = self.now, now
        return self._older

    def start(self, now: float) -> None:
        """Raise the tag of a flow that begins to wait, as far as it has no claim to missed service."""
        parent = self.parent
        assert parent is not None
        # The earlier time is read in any case: it must be noted while flows come and go.
        earlier = parent.earlier(now)
        self.tag = max(self.tag, earlier if now - self.active_at <= PAUSE else parent.now)

    def queue(self) -> None:
        """Enter the heap of the parent under the current tag. An earlier entry is out of date.

        A tag that grows later needs no new entry: the entry is corrected when it is the first.
        """
        parent = self.parent
        assert parent is not None
        heappush(parent._heap, self._new_entry(parent))
        if len(parent._heap) > 2 * len(parent.children) + _SPARE:
            parent._rebuild()

    def _new_entry(self, parent: Flow[T]) -> tuple[int, float, int, Flow[T]]:
        """Return the entry for the heap of the parent. An earlier one is out of date."""
        parent._entries += 1
        self._entry, self._queued_tag = parent._entries, self.tag
        return self.rank, self.tag, self._entry, self

    def order_by_deadline(self, item: T, deadline: float, longest_wait: float) -> None:
        """Order the requests of a leaf by deadline. The earlier ones without a deadline have it after ``longest_wait`` seconds."""
        heap = self._by_deadline
        if not heap:
            heap += [(since + longest_wait, number, each) for number, (each, since) in enumerate(self.requests.items()) if each is not item]
            self._entries += len(heap)
        self._entries += 1
        heappush(heap, (deadline, self._entries, item))
        if len(heap) > 2 * len(self.requests) + _SPARE:
            heap[:] = [each for each in heap if each[2] in self.requests]
            heapify(heap)

    @property
    def first(self) -> T:
        """The request of a leaf that is next."""
        heap = self._by_deadline
        while heap and heap[0][2] not in self.requests:
            heappop(heap)
        return heap[0][2] if heap else next(iter(self.requests))

    def expect(self, service: float) -> None:
        """Add to the service that the waiting requests of a leaf and the flows above it will probably get."""
        node: Flow[T] | None = self
        while node is not None:
            node.backlog += service
            node = node.parent

    @property
    def start_tag(self) -> float:
        """The tag with which it competes: its own, or at least the tag that it gets when it begins to wait."""
        return self.tag if self.waiting or self.parent is None else max(self.tag, self.parent.now)

    @property
    def top(self) -> Flow[T]:
        """The flow below the root that it belongs to."""
        node = self
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return node

    @property
    def oldest(self) -> float:
        """The time since which the first request of a leaf has waited."""
        return next(iter(self.requests.values()))

    def share(self, more: int = 0) -> float:
        """Return the number of waiting requests, and ``more``, divided by the weight."""
        return (self.waiting + more) / self.weight


class FairQueue(Generic[T]):
    """The waiting requests of a model."""

    def __init__(self) -> None:
        self.longest_wait = inf
        """Seconds of waiting after which a request without a deadline is as urgent as one whose deadline has passed."""
        self._root: Flow[T] = Flow("", 1.0, None)
        self._with_requests: dict[Flow[T], None] = {}
        """The leaves with waiting requests."""

    def __len__(self) -> int:
        return self._root.waiting

    def __iter__(self) -> Iterator[T]:
        """Iterate over all waiting requests, in no order between flows."""
        return (item for leaf in self._with_requests for item in leaf.requests)

    @property
    def oldest(self) -> float | None:
        """The time since which the oldest request has waited; None if the queue is empty."""
        return min((leaf.oldest for leaf in self._with_requests), default=None)

    def oldest_below(self, name: str) -> float | None:
        """Return the time since which the oldest request has waited in a flow at the top; None if none waits there."""
        return min((leaf.oldest for leaf in self._with_requests if leaf.top.name == name), default=None)

    def leaf(self, path: Sequence[Share]) -> Flow[T]:
        """Return the leaf at the end of a path. It and the flows above it are created, or get the weights of the path."""
        node = self.flow(path)
        return self._child(node, _UNNAMED) if node.children else node

    def flow(self, path: Sequence[Share]) -> Flow[T]:
        """Return the flow at the end of a path, as ``leaf`` does. It may have flows below it."""
        node = self._root
        for share in path:
            node = self._child(node, share)
        return node

    def path_to(self, names: Sequence[str]) -> list[Flow[T]] | None:
        """Return the flows with these names from the top downward; None if a flow does not exist."""
        found, node = [], self._root
        for name in names:
            if (child := node.children.get(name)) is None:
                return None
            found.append(node := child)
        return found

    def _child(self, node: Flow[T], share: Share) -> Flow[T]:
        child = node.children.get(share.name)
        if child is None:
            child = node.children[share.name] = Flow(share.name, share.weight, node)
            child.tag = node.now
        child.weight, child.tier = share.weight, share.tier
        if child.rank != share.rank:
            child.rank = share.rank
            if child.waiting:
                child.queue()
        return child

    def put(self, item: T, leaf: Flow[T], since: float, now: float, deadline: float = inf) -> None:
        """Add a request to a leaf, in the order of waiting, or of deadlines if a request of the leaf has one."""
        requests = leaf.requests
        latest = next(reversed(requests.values()), since)
        requests[item] = since
        if since < latest:  # it was dispatched before and came back without a server
            leaf.requests = dict(sorted(requests.items(), key=lambda pair: pair[1]))
        if deadline < inf or leaf._by_deadline:
            leaf.order_by_deadline(item, min(deadline, since + self.longest_wait), self.longest_wait)
        self._with_requests[leaf] = None
        node = leaf
        while (parent := node.parent) is not None:
            node.waiting += 1
            if node.waiting == 1:
                node.start(now)
                node.queue()
            node = parent
        node.waiting += 1

    def candidates(self, deficit: float, tier: float = inf, *, below_top: bool = False) -> list[Flow[T]]:
        """Return the leaves whose first request may be dispatched, at most ``CANDIDATES``. The first is that of ``next``.

        ``below_top``: the flows at the top are not deferred for each other.
        """
        top = self._root.next_child(tier) if below_top else self._root
        found, has_parents = [] if top is None else [top], True
        while has_parents:
            nodes, found, has_parents = found, [], False
            most = CANDIDATES // max(len(nodes), 1)
            for node in nodes:
                if node.requests:
                    found.append(node)
                elif node.waiting:
                    has_parents = True
                    found += node.near(deficit, most)
        return found

    def pop(self, now: float, tier: float = inf, preferred: Flow[T] | None = None) -> tuple[T, Flow[T]]:
        """Remove and return the next request up to a tier, which is dispatched, and its leaf. Raises ValueError without such a request.

        ``preferred``: one of the ``candidates``, of which it is the next one.
        """
        item, leaf = self.next(tier) if preferred is None else (preferred.first, preferred)
        node = leaf
        while (parent := node.parent) is not None:
            reached = node.settled
            if preferred is not None and (least := parent.next_child(node.tier)) is not None:
                reached = min(reached, least.settled)
            parent.now = max(parent.now, reached)
            node = parent
        self.remove(item, leaf, now)
        leaf.in_flight += 1
        return item, leaf

    def next(self, tier: float = inf) -> tuple[T, Flow[T]]:
        """Return the next request up to a tier, and its leaf. Raises ValueError without such a request."""
        node = self._root
        # A leaf that has become a parent still has the requests from before.
        while not node.requests and (child := node.next_child(tier)) is not None:
            node = child
        if not node.requests:
            raise ValueError("the queue is empty up to this tier")
        return node.first, node

    def waits_up_to(self, tier: float) -> bool:
        """Return whether ``pop`` would return a request."""
        return self._root.waiting > 0 and tier >= 0 and (tier == inf or self._root.next_child(tier) is not None)

    def remove(self, item: T, leaf: Flow[T], now: float) -> None:
        """Remove a request. Raises KeyError if it does not wait."""
        del leaf.requests[item]
        if not leaf.requests:
            del self._with_requests[leaf]
            leaf._by_deadline.clear()
        node: Flow[T] | None = leaf
        while node is not None:
            node.waiting -= 1
            node.active_at = now
            node = node.parent

    def charge(self, leaf: Flow[T], service: float, now: float) -> None:
        """Charge the flows from a leaf upward for an estimate of a request that was dispatched, or for a change of the estimate."""
        self._charge(leaf, service, service, now)

    def settle(self, leaf: Flow[T], estimate: float, service: float, now: float) -> None:
        """Replace the estimate of a request that has ended by its service."""
        leaf.in_flight -= 1
        self._charge(leaf, service - estimate, -estimate, now)

    def _charge(self, leaf: Flow[T], service: float, pending: float, now: float) -> None:
        node = leaf
        while (parent := node.parent) is not None:
            node.tag += service / node.weight
            node.pending += pending
            node.active_at = now
            if node.waiting and node.tag < node._queued_tag:
                node.queue()
            node = parent

    def charge_served(self, flow: Flow[T], service: float, last: float, now: float) -> None:
        """Charge flows for requests that were served without waiting. ``last`` is the service of the last request.

        Virtual time follows, as if each of them had been dispatched, but no further than to a flow that waits.
        """
        self._charge(flow, service, 0.0, now)
        node = flow
        while (parent := node.parent) is not None:
            waiting = parent.next_child()
            started = node.settled - min(last, max(service, 0.0)) / node.weight
            parent.now = max(parent.now, started if waiting is None else min(started, waiting.settled))
            parent.earlier(now)
            node = parent

    def lag(self, leaf: Flow[T]) -> float:
        """Return the service by which a leaf and the flows above it are behind the next waiting ones of their rank."""
        lag, node = 0.0, leaf
        while (parent := node.parent) is not None:
            waiting = parent.next_child()
            if waiting is not None and waiting.rank == node.rank:
                lag = max(lag, (node.tag - waiting.tag) * node.weight)
            node = parent
        return lag

    def forget(self, now: float) -> list[Flow[T]]:
        """Remove the flows that have been idle for ``MEMORY`` seconds. Returns them."""
        return list(_forgotten(self._root, now))

    def forget_some(self, flow: Flow[T]) -> None:
        """Remove the idle flows without a debt directly below a flow that has many: a client may name any number of them."""
        if len(flow.children) >= flow._many:
            flow.children = {name: child for name, child in flow.children.items() if child.is_used or child.tag > flow.now}
            flow._many = max(MANY, 2 * len(flow.children))

    def displaced_by(self, leaf: Flow[T]) -> T | None:
        """Return the request that a new request of this leaf would displace if the queue is full; None if the new one itself is refused.

        From the root downward, it is a request of the sibling with the most waiting requests for its weight, provided that the new
        request's own flow has fewer even with it. It is never the last request of that sibling.
        """
        path = [leaf]
        while (above := path[-1].parent) is not None:
            path.append(above)
        for parent, own in zip(path[:0:-1], path[-2::-1], strict=True):
            largest = max((child for child in parent.children.values() if child.waiting > 1), key=Flow.share, default=None)
            if largest is None:
                return None
            if largest is own:
                continue
            if largest.share() <= own.share(1) and own.waiting:
                return None
            while (below := max((child for child in largest.children.values() if child.waiting), key=Flow.share, default=None)) is not None:
                largest = below
            return next(reversed(largest.requests))
        return None


def _forgotten(node: Flow[T], now: float) -> Iterator[Flow[T]]:
    """Remove the idle flows below a node, and yield them."""
    for child in tuple(node.children.values()):
        yield from _forgotten(child, now)
        if not child.is_used and now - child.active_at > MEMORY:
            del node.children[child.name]
            yield child
