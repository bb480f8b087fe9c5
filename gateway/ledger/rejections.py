"""The requests without a valid key: a bounded sample of them, from the worker to the memory of control.

They have no rows, because anyone can send them and could fill the disk. The rules: a worker reports a bounded number for each tick and
client, so a client that sends many displaces its own requests and not those of others. Control keeps the last ones of a bounded number of
clients, in memory only. The number of all of them is in ``vllm_gateway_auth_failures_total``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from gateway.snapshot.link import RejectedRequest, RejectedRequests
from gateway.system.addresses import counted_client
from gateway.telemetry.request_record import RequestRecord

_PER_TICK, _CLIENTS_PER_TICK = 4, 32  # requests of a client, and clients, of a tick of a worker
_PER_CLIENT, _CLIENTS = 20, 500  # requests of a client, and clients, in memory: about 5 MB at most
_DETAIL_LIMIT = 256  # characters


def _ignore(_: RejectedRequests) -> None:
    """Do nothing: there is no control process to report to."""


class RejectionSample:
    """The requests of one worker since its last tick. ``report`` sends them to control."""

    def __init__(self) -> None:
        self.report: Callable[[RejectedRequests], None] = _ignore
        self._by_client: dict[str, list[RejectedRequest]] = {}
        self._omitted = 0

    def add(self, record: RequestRecord) -> None:
        """Add a request that ended with an error and has no key."""
        client = _client_of(record.client)
        if (known := self._by_client.get(client)) is None:
            if len(self._by_client) >= _CLIENTS_PER_TICK:
                self._omitted += 1
                return
            known = self._by_client[client] = []
        if len(known) >= _PER_TICK:
            self._omitted += 1
            return
        assert record.code is not None
        detail = None if record.detail is None else record.detail[:_DETAIL_LIMIT]
        known.append(RejectedRequest(record.id, record.started, record.endpoint, record.status, record.code, detail, record.client))

    def flush(self) -> None:
        """Report the requests, if there are any."""
        if self._by_client:
            self.report(RejectedRequests(tuple(request for known in self._by_client.values() for request in known), self._omitted))
            self._by_client, self._omitted = {}, 0


class RecentRejections:
    """The last rejected requests of each client. Beyond a number of clients, the client that was silent the longest is forgotten."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, deque[RejectedRequest]] = OrderedDict()
        self.omitted = 0
        """Requests that no worker has reported, since control started."""

    def add(self, message: RejectedRequests) -> None:
        """Add the requests that a worker has reported."""
        self.omitted += message.omitted
        for request in message.requests:
            client = _client_of(request.client)
            self._by_client.setdefault(client, deque(maxlen=_PER_CLIENT)).append(request)
            self._by_client.move_to_end(client)
        while len(self._by_client) > _CLIENTS:
            self._by_client.popitem(last=False)

    def __iter__(self) -> Iterator[RejectedRequest]:
        return (request for known in self._by_client.values() for request in known)


def _client_of(address: str | None) -> str:
    return "" if address is None else counted_client(address)
