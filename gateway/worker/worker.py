"""One worker: it applies snapshots and health reports, and runs the periodic work.

A ``Worker`` can be created from a fixed ``Snapshot``, without a control process. The rule: live servers, in-flight slots and counts stay
when a snapshot is applied; everything that is compiled from a snapshot is replaced with it (``ActiveSnapshot``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from gateway.admission.body_memory import FREE
from gateway.admission.inflight import ConcurrencyLimit, worker_share
from gateway.admission.shares import QueueShares
from gateway.auth.catalog import Catalog
from gateway.auth.keyring import Keyring
from gateway.auth.stored_keys import StoredKeyring
from gateway.client.active_snapshot import ActiveSnapshot
from gateway.client.addresses import Proxies
from gateway.client.connection import ClientConnection
from gateway.client.connection_context import ConnectionContext
from gateway.client.http.cors import Cors
from gateway.client.request import Handler
from gateway.proxy.request_services import RequestServices
from gateway.snapshot.link import CachedBlocks, Health, StoredKeys, UnknownSigningKey
from gateway.snapshot.snapshot import Model, Snapshot
from gateway.system.tls import Certificate
from gateway.telemetry.request_ids import RequestSample
from gateway.telemetry.trace import Sampler
from gateway.worker.app import WorkerApp
from gateway.worker.peer_placements import PeerPlacements
from gateway.worker.slot_signals import SharedSlots
from upstream.balancing.cost_model import CostModel
from upstream.balancing.moves import move_responses
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.cost import Cost, CostSettings
from upstream.balancing.pool import LiveServers
from upstream.balancing.server import Progress, Server
from upstream.balancing.shared_limit import SharedServer
from upstream.http.deadlines import TICK, check_all

if TYPE_CHECKING:
    from gateway.auth.jwt import TokenVerifier

_SWEEP_EVERY = 4  # ticks


class Worker:
    """The connections and the requests of one worker, and its servers. ``number`` is the number of this worker.

    ``handle_request`` serves one inference request to its end. ``stored_keys`` are the store's keys at the start. ``slots``: shared with
    other workers; None for a single worker.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        requests: RequestServices,
        handle_request: Handler,
        *,
        fleet: LiveServers,
        number: int = 0,
        peers: PeerPlacements | None = None,
        stored_keys: StoredKeyring | None = None,
        slots: SharedSlots | None = None,
    ) -> None:
        self.requests = requests
        self.connections = ConnectionContext(requests.metrics, fleet.write_batch, requests.memory, requests.steps)
        self.connection = partial(ClientConnection, self.connections, handle_request)
        """Creates the protocol of a connection that has been accepted on the data port."""
        self.fleet = fleet
        self.number = number
        self._peers = peers
        self._slots = slots
        self._tokens: TokenVerifier | None = None
        self._stored_keys = stored_keys or StoredKeyring()
        self.certificate = Certificate(snapshot.tls) if snapshot.tls else None
        self._catalog: Catalog | None = None
        self.costs: dict[str, CostModel] = {}
        """The knowledge about the servers of each model with the policy ``cost``, by the model's ID."""
        self._ticks = self._dropped_lines = 0
        self.progress: Mapping[str, Progress] = {}
        """The progress of the servers whose responses were awaited in the last tick."""
        self.app = self.connections.other_routes = WorkerApp(requests, self.connections.request_ids)
        self.apply_snapshot(snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot."""
        return self.requests.active.snapshot

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Serve requests by this snapshot from now on. A request in flight keeps its model and its limits."""
        requests, metrics = self.requests, self.requests.metrics
        servers = self.fleet.reconcile(spec for model in snapshot.bases for spec in model.servers)
        metrics.create_series(snapshot)
        if self._catalog is not None:
            self._catalog.retire()
        for model in snapshot.bases:
            for index, spec in enumerate(model.servers):
                server = servers[spec.name]
                server.publish_in_flight(metrics.cells("server_inflight", model.id, spec.name))
                server.model_id, server.move_after = model.id, model.move_after
                server.ejected_cells = metrics.cells("server_ejected", model.id, spec.name)
                self._set_limit(server, model, index)
        limit, tracing = snapshot.max_inflight, snapshot.tracing
        requests.queues.reserved.apply_snapshot(snapshot, servers, self.number)
        self.costs = {
            model.id: self.costs.get(model.id) or CostModel(CostSettings(**model.policy).kv_cache_tokens, peers=self._peers)
            for model in snapshot.bases
            if POLICIES[model.balance] is Cost
        }
        requests.engine_caches = {model: costs.engines for model, costs in self.costs.items()}
        catalog = Catalog(snapshot.models, servers, snapshot.default_model, self.costs, self._recorded_models(snapshot))
        if self._catalog is not None:
            self._catalog.hand_over(catalog)
        self._catalog = catalog
        if self._peers is not None:
            self._peers.set_models(self.costs)
        self.connections.active = requests.active = ActiveSnapshot(
            snapshot=snapshot,
            keyring=Keyring(snapshot.keys, self._token_verifier(snapshot), self._stored_keys),
            catalog=catalog,
            cors=Cors(snapshot.cors_origins),
            proxies=Proxies(snapshot.clients.trusted_proxies),
            body_allowance=min(snapshot.body_limit, FREE),
            concurrency_limit=None if limit is None else ConcurrencyLimit(worker_share(limit, self.number, snapshot.workers)),
            sampler=None if tracing is None else Sampler(tracing),
            shape_sample=RequestSample(snapshot.log_sample) if snapshot.log_sample else None,
        )
        if tracing is not None:
            requests.spans.endpoint, requests.spans.scheme = tracing.endpoint, "http" if self.certificate is None else "https"
        requests.memory.limit = snapshot.clients.body_memory
        requests.limiter.apply_snapshot(snapshot, self._stored_keys.by_id)
        if requests.ledger is not None:
            requests.ledger.apply_snapshot(snapshot)
        served = [(entry.model, entry.pool) for entry in catalog.entries if not entry.model.split]
        requests.queues.set_models(served, QueueShares.of(snapshot))

    def _set_limit(self, server: Server, model: Model, index: int) -> None:
        """Bound a server's requests in flight. ``index``: its place in the model."""
        limit = model.max_inflight
        if model.has_auto_max_inflight:
            limit = self.app.health.max_inflight.get(server.name, limit)
        if self._slots is not None and isinstance(server, SharedServer):
            server.shared = None if limit is None else self._slots.limit(model.id, server.name, index, limit)
        server.set_limit(math.inf if limit is None else limit)

    def _recorded_models(self, snapshot: Snapshot) -> Callable[[Model], bool]:
        """Record by this snapshot. Returns whether requests for a model may be recorded."""
        if (recorder := self.requests.recorder) is None:
            return lambda _: False
        recorder.apply_settings(snapshot.recording)
        return (lambda _: False) if recorder.selection is None else recorder.selection.includes_model

    def _token_verifier(self, snapshot: Snapshot) -> TokenVerifier | None:
        """Return what verifies the tokens of this snapshot's issuers; None without issuers."""
        if not snapshot.issuers:
            self._tokens = None
            return None
        from gateway.auth.jwt import TokenVerifier  # with PyJWT, which is an optional dependency

        self._tokens = self._tokens or TokenVerifier(lambda issuer: self.requests.send(UnknownSigningKey(issuer)))
        self._tokens.apply_snapshot(snapshot)
        return self._tokens

    def apply_stored_keys(self, message: StoredKeys) -> None:
        """Apply what has changed among the store's keys. A request in flight keeps its key and its limits."""
        self._stored_keys.apply(message)
        self.requests.limiter.apply_stored_keys(message)

    def apply_health(self, health: Health) -> None:
        """Apply control's report about servers and models."""
        for name, condition in health.conditions.items():
            if self.fleet.set_condition(name, condition) and self.costs:
                self._apply_placements()  # of the earlier process
                for costs in self.costs.values():
                    costs.restarted(name)  # the cache of a new process is empty
        for live in self.fleet:
            live.scale_out = live.name in health.scale_out
            live.loaded = health.loaded.get(live.name, "")
        self.app.health = health
        if health.max_inflight:
            for model in self.snapshot.bases:
                for index, spec in enumerate(model.servers if model.has_auto_max_inflight else ()):
                    if (server := self.fleet.find(spec.name)) is not None:
                        self._set_limit(server, model, index)
            self.requests.queues.reserved.apply()
        self.requests.limiter.max_model_len = health.max_model_len
        self.requests.queues.set_expected(health.expected)

    def apply_cached_blocks(self, message: CachedBlocks) -> None:
        """Apply what the KV cache events of servers have changed."""
        for each in message.changes:
            for costs in self.costs.values():
                if each.server in costs.servers:
                    costs.engines.apply(
                        each.server, each.block_size, each.complete, cleared=each.cleared, removed=each.removed, inserted=each.inserted
                    )

    def use_free_slots(self) -> None:
        """Resume queued requests for which other workers have freed slots, and offer them the others."""
        for server in self.fleet:
            if server.is_shared:
                server.update_rankings()
                server.offer_slot()

    def tick(self) -> None:
        """Run the periodic work for all requests, a few times a second."""
        connections, requests = self.connections, self.requests
        connections.update_date()
        self.progress = self.fleet.take_progress()
        requests.deadlines.tick()
        connections.unauthenticated.relieve()
        requests.queues.tick()
        self.use_free_slots()
        requests.limiter.tick()
        if requests.ledger is not None:
            requests.ledger.tick()
        if requests.recorder is not None:
            requests.recorder.tick()
        self._apply_placements()
        requests.log.flush()
        before, self._dropped_lines = self._dropped_lines, requests.log.dropped
        requests.metrics.cells("log_lines_dropped_total")[0] += self._dropped_lines - before
        requests.spans.flush()
        self._ticks += 1
        if self._ticks % _SWEEP_EVERY == 0:
            self._sweep()

    def _apply_placements(self) -> None:
        """Apply the placements of the other workers, and the engines' load."""
        if self._peers is not None and self.costs:
            self._peers.catch_up()

    def _sweep(self) -> None:
        """Run the periodic work for all connections to servers and clients, about once a second."""
        self.fleet.expire()
        for server in self.fleet.with_movable_responses():
            if (pool := self.requests.active.catalog.pool(server.model_id)) is not None:
                move_responses(server, pool.servers, monotonic())
        for model, costs in self.costs.items():
            self.requests.metrics.cells("prefix_index_blocks", model, str(self.number))[0] = costs.index.size
        check_all(self.connections.connections, _SWEEP_EVERY * TICK)
        if self.certificate is not None and self.snapshot.tls is not None:
            self.certificate.reload(self.snapshot.tls)
