"""Share what a worker knows about servers with the other workers, by the placement log.

The rule: a worker applies the records of the others before it chooses a server, and at each tick, so that an idle worker does not fall
behind. The requests of a worker that has died stop counting when its successor writes that it has started.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from upstream.balancing.cost_model import CostModel, EngineLoad
from upstream.balancing.placement_log import Kind, PlacementLog, Record, server_key

_NANO = 1_000_000_000


class PeerPlacements:
    """One worker's end of the placement log. Implements ``Peers`` of the cost models."""

    def __init__(self, log: PlacementLog) -> None:
        self._log = log
        self._models: dict[int, tuple[CostModel, str]] = {}
        self._keys: dict[str, int] = {}
        self._in_flight = defaultdict[int, Counter[int]](Counter)  # by section and server
        self._is_new = True

    def set_models(self, costs: Mapping[str, CostModel]) -> None:
        """Share the placements of these models from now on."""
        self._keys |= {name: server_key(name) for model in costs.values() for name in model.servers}
        self._models = {self._keys[name]: (model, name) for model in costs.values() for name in model.servers}
        if self._is_new and costs:
            self._is_new = False
            self.catch_up()
            self._forget(self._log.section)
            self._log.write(Kind.STARTED, 0)

    def placed(self, server: str, keys: Sequence[int], uncached: float) -> None:
        """Report that a prompt was sent to a server."""
        self._log.write(Kind.PLACED, self._keys[server], int(uncached), keys)

    def finished(self, server: str, keys: Sequence[int], generated: int) -> None:
        """Report the end of a request, and the tokens of its completion."""
        self._log.write(Kind.FINISHED, self._keys[server], generated, keys)

    def catch_up(self) -> None:
        """Apply the records of the other processes since the last call."""
        for record in self._log.read():
            if record.kind is Kind.STARTED:
                self._forget(record.section)
            elif (found := self._models.get(record.server)) is not None:
                self._apply(record, *found)

    def _forget(self, section: int) -> None:
        """End all requests of a section: they ended with its earlier process."""
        for server, count in self._in_flight.pop(section, Counter[int]()).items():
            if (found := self._models.get(server)) is not None:
                model, name = found
                model.peers_ended(name, count)

    def _apply(self, record: Record, model: CostModel, name: str) -> None:
        match record.kind:
            case Kind.PLACED:
                self._in_flight[record.section][record.server] += 1
                model.peer_placed(name, record.keys, float(record.value))
            case Kind.FINISHED:
                self._in_flight[record.section][record.server] -= 1
                model.peer_finished(name, record.keys, record.value)
            case Kind.LOAD:
                running, waiting, used = record.keys
                model.engine_load(name, EngineLoad(record.value / _NANO, running, waiting, used / 1000))
            case Kind.CAPACITY:
                model.set_cache_size(name, record.value)
