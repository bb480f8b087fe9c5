"""Report the gateway's state for the admin port: metrics, status, keys and usage. Nothing is changed from here.

The rule: every value is read at the time of the request, from the part that owns it. Nothing is stored here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway import __version__
from gateway import config as conf
from gateway.admin.engine_metrics import Engine
from gateway.config.values import TRACE_ID
from gateway.control.control import Control
from gateway.control.limit_report import closest_limits, limit_report
from gateway.fleet.configured_servers import ConfiguredServer, configured_servers, model_of_launched
from gateway.fleet.fleet import ModelStatus
from gateway.fleet.observed_servers import ObservedServers, health_check_targets, models_served, ready_servers, wrong_models
from gateway.fleet.snapshot_builder import recording
from gateway.key_management.key_list import LastUse, expiry, list_keys, token_entries
from gateway.limits.windows import BudgetState
from gateway.monitoring.discovery import discovered_models
from gateway.recording.reading import read_record
from gateway.snapshot.snapshot import Key
from gateway.store.documents import team_settings
from gateway.system.compiled_core import core
from gateway.telemetry.metrics import Series, sum_series
from gateway.worker.process_metrics import process_series
from upstream.balancing.server import Condition
from upstream.vllm.probe_hints import probe_hint

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog
    from gateway.ledger.writer import Ledger
    from gateway.usage.reader import UsageReader

_APPLY_TIMEOUT = 0.5  # seconds that a status waits for the workers to apply what it shows
_COUNTED_BY_WORKERS = ("server_inflight", "server_ejected")  # 0 for a server that no worker has counted yet
SeriesValues = Mapping[Series, Sequence[float]]


@dataclass(eq=False, slots=True)
class GatewayReport:
    """The admin port's ``Overview`` of the gateway. ``ledger``, ``reader`` and ``audit`` are None if they are not configured."""

    _control: Control
    _ledger: Ledger | None = None
    _reader: UsageReader | None = None
    _audit: AuditLog | None = None

    def not_ready(self) -> str | None:
        """Return why the gateway is not ready for traffic, or None if it is ready."""
        return self._control.readiness.not_ready()

    def degraded(self) -> list[str]:
        """Explain why some requests cannot be served as configured."""
        return self._control.readiness.degraded()

    # Metrics

    def series(self) -> SeriesValues:
        """Return every series: the sums of the workers' counters, and control's own."""
        control = self._control
        series: dict[Series, Sequence[float]] = self._without_removed_servers(sum_series(control.workers.boards))
        for server in configured_servers(control.config):
            for family in _COUNTED_BY_WORKERS:
                series.setdefault(Series(family, (server.model.id, server.name)), (0,))
        return series | {one: (value,) for one, value in self.own_series().items()}

    def own_series(self) -> dict[Series, float]:
        """Return the series that control itself knows, without the workers' counters. Each has one value."""
        parts = (part.series() for part in (self._ledger, self._audit) if part is not None)
        return {**dict(self._of_servers()), **dict(self._of_control())} | {one: values[0] for part in parts for one, values in part.items()}

    def _of_servers(self) -> Iterator[tuple[Series, float]]:
        config, observed = self._control.config, self._control.observer.observe()
        for server in configured_servers(config):
            condition, labels = observed.condition(server.name), (server.model.id, server.name)
            yield Series("server_up", labels), float(condition is Condition.UP)
            yield Series("server_out_of_rotation", labels), float(condition is Condition.OUT_OF_ROTATION)
            if server.model.max_inflight is not None:
                yield Series("server_max_inflight", labels), self._limit(server).get("max_inflight", server.model.max_inflight)
            if server.external is None:
                status = observed.launched.get(server.name)
                yield Series("server_restarts_total", labels), status.restarts if status else 0
        for server, wrong in models_served(config, observed):
            yield Series("server_serves_model", (server.model.id, server.name)), float(not wrong)
        yield from ((Series("ready_servers", (model,)), count) for model, count in ready_servers(config, observed).items())

    def _of_control(self) -> Iterator[tuple[Series, float]]:
        control = self._control
        yield from ((Series("discovery_up", (model,)), float(well)) for model, well in control.discovery.well(control.config))
        yield from ((Series("key_set_up", (issuer,)), float(well)) for issuer, well in control.key_sets.well())
        yield from control.monitor.observed_dependencies().series()
        yield from control.kv_events.series()
        yield from control.monitor.certificate.series(control.config)
        yield from ((Series("launches_total", outcome), count) for outcome, count in control.launch_counts.launches.items())
        yield from ((Series("launch_failures_total", cause), count) for cause, count in control.launch_counts.failures.items())
        yield from ((Series("config_reloads_total", (result,)), count) for result, count in control.history.counts.items())
        yield Series("config_last_reload_successful", ()), float(control.history.last.successful)
        expiries = ((key.id, expiry(key)) for key in control.config.keys)
        yield from ((Series("key_expires_timestamp_seconds", (key,)), last.timestamp()) for key, last in expiries if last is not None)
        for holder, state in self._budgets():
            yield Series("budget_used_ratio", (holder, state.budget.name, str(state.budget.soft).lower())), state.share
        for owner, users in control.workers.users_held().items():
            yield Series("limited_users", (owner,)), users
        if control.key_store is not None:
            yield from control.key_store.series()
        if control.notices is not None:
            yield from control.notices.series()
        yield Series("worker_restarts_total", ()), sum(worker.restarts for worker in control.workers.statuses)
        yield from process_series(control.workers.statuses)
        yield Series("build_info", (__version__, core())), 1

    def _budgets(self) -> Iterator[tuple[str, BudgetState]]:
        workers, keys = self._control.workers, self._control.key_store
        if workers.snapshot is not None and workers.snapshot.uses_store:
            return self._control.store_counts.budgets()
        return workers.budgets(() if keys is None else keys.used(workers.buckets.is_counted, only_budgets=True))

    def _without_removed_servers(self, series: Mapping[Series, list[float]]) -> dict[Series, Sequence[float]]:
        """Omit discovered servers that were removed and have nothing in flight.

        Their counts are retained for a later server with the same name.
        """
        config = self._control.config
        discovered = {model.id for model, _ in discovered_models(config)}
        shown: set[tuple[str, ...]] = {(server.model.id, server.name) for server in configured_servers(config)}
        shown |= {one.labels for one, values in series.items() if one.family == "server_inflight" and values[0]}
        return {
            one: values
            for one, values in series.items()
            if not (one.family.startswith("server_") and one.labels[0] in discovered) or one.labels[:2] in shown
        }

    # Usage, keys, and the servers' own metrics

    async def usage(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the ledger's response to a usage query, None without a ledger."""
        return None if self._reader is None else await self._reader.report(query)

    async def requests(self, query: Mapping[str, str]) -> dict[str, Any] | None:
        """Return a page of single requests, None without a ledger. Raises QueryError and DatabaseUnavailableError."""
        return None if self._reader is None or self._ledger is None else await self._reader.requests(query, self._ledger.rejections)

    async def request(self, identity: str) -> dict[str, Any] | None:
        """Return what happened to a request, empty for an unknown one, None without a ledger. Raises DatabaseUnavailableError."""
        if self._reader is None or self._ledger is None:
            return None
        found = await self._reader.request(identity, self._ledger.rejections)
        if found is None:
            return {}
        tracing, trace_id = self._control.config.tracing, found["request"]["trace_id"]
        template = None if tracing is None or trace_id is None else tracing.trace_url
        trace_url = None if template is None else template.replace(TRACE_ID, trace_id)
        return found | {"records": self._control.config.record is not None, "trace_url": trace_url}

    async def record(self, identity: str) -> dict[str, Any] | None:
        """Return the record of a request, None if requests are not recorded. Raises RecordError."""
        settings = self._control.config.record
        return None if settings is None else await asyncio.to_thread(read_record, recording(settings), identity)

    def months(self) -> UsageReader | None:
        """Return what reads and closes months, None without a ledger."""
        return self._reader

    async def limits(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the state of limits (see ``limit_report`` and ``closest_limits``). Raises QueryError."""
        workers, stored = self._control.workers, self._control.store_counts
        await stored.refresh()
        if workers.snapshot is None:
            return {"limits": []}
        if "closest" in query:
            keys = self._control.key_store
            more = () if keys is None else keys.used(workers.buckets.is_counted, only_budgets=False)
            return closest_limits(workers.snapshot, workers.buckets, stored, more, query)
        shown = replace(workers.snapshot, keys=(*workers.snapshot.keys, *self._stored_keys(query)))
        return limit_report(shown, workers.buckets, stored, query)

    def _stored_keys(self, query: Mapping[str, str]) -> Iterator[Key]:
        """Yield the keys of the store that a query names: the key, or any key of the team, which has the team's limits."""
        if (store := self._control.key_store) is not None:
            named = (query.get("key"), store.key), (query.get("team"), store.key_of_team)
            yield from (key for name, find in named if name is not None and (key := find(name)) is not None)

    async def keys(self) -> dict[str, Any]:
        """Return the keys as /keys shows them."""
        config = self._control.config
        return list_keys(config, await self.last_use([key.id for key in config.keys], token_entries(config)), datetime.now(UTC))

    def teams(self) -> dict[str, Any]:
        """Return the teams of the configuration as /teams shows them."""
        teams = self._control.config.teams
        counts = self.keys_of_teams([each.id for each in teams])
        return {"teams": [{**team_settings(each), "keys": counts[each.id]} for each in teams]}

    def keys_of_teams(self, teams: Iterable[str]) -> dict[str, int]:
        """Return the number of keys of each team, in the configuration and in the store."""
        store, of_file = self._control.key_store, Counter(key.team for key in self._control.config.keys)
        return {team: of_file[team] + (0 if store is None else store.count_of_team(team)) for team in teams}

    async def last_use(self, keys: Sequence[str], of_tokens: Set[str] = frozenset()) -> LastUse:
        """Return when keys were last used, or why that is unknown. ``of_tokens`` are those that are used for tokens."""
        return LastUse({}, "no ledger is configured") if self._reader is None else await self._reader.last_use(keys, of_tokens)

    def engines(self) -> dict[str, Engine]:
        """Return the running servers by name."""
        config = self._control.config
        models = {server.name: server.model.id for server in configured_servers(config)}
        targets = health_check_targets(config, self._control.observer.observe())
        return {target.name: Engine(models.get(target.name) or model_of_launched(target.name), target) for target in targets}

    # The status

    def status(self) -> dict[str, Any]:
        """Return the JSON of /status, without the last log lines of launched servers."""
        control = self._control
        observed, series, reason = control.observer.observe(), sum_series(control.workers.boards), self.not_ready()
        servers: dict[str, list[ConfiguredServer]] = defaultdict(list)
        for server in configured_servers(control.config):
            servers[server.model.id].append(server)
        return {
            "version": __version__,
            "time": time.time(),
            "started": control.started,
            "ready": reason is None,
            "reason": reason,
            "degraded": self.degraded(),
            "dependencies": control.monitor.observed_dependencies().as_json(),
            "snapshot_version": control.publisher.version,
            "configuration": control.history.last.as_json(),
            "ledger": None if self._ledger is None else self._ledger.status(),
            "store": None if control.key_store is None else control.key_store.status(),
            "budgets": control.budgets.as_json() or control.store_counts.as_json(),
            "notices": None if control.notices is None else control.notices.status(),
            "issuers": control.key_sets.as_json(control.config),
            "workers": [
                {
                    "number": worker.number,
                    "pid": worker.pid,
                    "up": worker.up,
                    "snapshot_version": worker.version,
                    "restarts": worker.restarts,
                    "since": worker.since,
                    "connections": worker.connections,
                }
                for worker in control.workers.statuses
            ],
            "models": [self._model_status(model, servers[model.id], observed, series) for model in control.config.served_models],
            "splits": [_split_status(model) for model in control.config.models if model.split],
        }

    async def status_with_logs(self) -> dict[str, Any]:
        """Return the JSON of /status. The workers have applied what it shows, up to a timeout."""
        shown, control = self.status(), self._control
        await control.workers.wait_applied(control.publisher.publish_health(), _APPLY_TIMEOUT)
        launched = [server for model in shown["models"] for server in model["servers"] if "log" in server]
        logs = [control.launcher.servers[server["name"]].log for server in launched]
        for server, tail in zip(launched, await asyncio.to_thread(lambda: [log.tail() for log in logs]), strict=True):
            server["last_log_lines"] = tail.splitlines()
        return shown

    def _model_status(
        self, model: conf.Model, servers: Sequence[ConfiguredServer], observed: ObservedServers, series: SeriesValues
    ) -> dict[str, Any]:
        control = self._control
        status = control.fleet.status(model.id)
        return {
            **self._traffic(model.id, series),
            **self._last_choice(model.id),
            "continuations": _continuations(model.id, series),
            "max_inflight": model.max_inflight,
            "aliases": list(model.aliases),
            "state": status.state.value,
            "since": status.since,
            "queued": status.queued,
            "waiting_s": status.waiting,
            "launched": any(server.external is None for server in servers),
            "discovery": control.discovery.as_json(model),
            "loras": [self._traffic(lora.id, series) | {"aliases": list(lora.aliases)} for lora in model.loras],
            "servers": [self._server_status(server, status, observed, series) for server in servers],
        }

    def _last_choice(self, model: str) -> dict[str, Any]:
        """Return the last explained choice of a server, if the model's choices are explained."""
        if (choice := self._control.workers.last_choice(model)) is None:
            return {}
        return {"last_choice": {"request_id": choice.request_id, "time": choice.time, "server": choice.server, **choice.explanation}}

    def _traffic(self, model: str, series: SeriesValues) -> dict[str, Any]:
        in_flight = int(series.get(Series("inflight_requests", (model,)), (0,))[0])
        return {"id": model, "in_flight": in_flight, "tokens_per_second": asdict(self._control.monitor.rates.rate(model))}

    def _limit(self, server: ConfiguredServer) -> dict[str, Any]:
        """Return the limit of a server if it follows the server's load, and the reason for it."""
        if not server.model.max_inflight_follows_load:
            return {}
        limit = self._control.auto_limits.limit(server)
        return {"max_inflight": limit.value, "max_inflight_reason": limit.reason}

    def _server_status(
        self, server: ConfiguredServer, of_model: ModelStatus, observed: ObservedServers, series: SeriesValues
    ) -> dict[str, Any]:
        control, condition, labels = self._control, observed.condition(server.name), (server.model.id, server.name)
        status, probe = observed.launched.get(server.name), observed.probes.get(server.name)
        moments = [control.publisher.changed_at.get(server.name, 0.0), status.since if status else 0.0]
        if condition is Condition.OUT_OF_ROTATION:
            moments.append(of_model.since)  # its state is the model's, which changes meanwhile: it drains before it is stopped
        is_cordoned = server.name in control.observer.cordoned
        shown: dict[str, Any] = {
            "name": server.name,
            "condition": condition.value,
            "in_flight": int(series.get(Series("server_inflight", labels), (0,))[0]),
            **self._limit(server),
            "ejected_by": int(series.get(Series("server_ejected", labels), (0,))[0]),
            "scale_out": probe is not None and probe.scale_out,
            "since": max(moments) or None,
            "reason": (status.reason if status else "")
            or control.observer.hung.get(server.name, "")
            or (probe.reason if probe else "")
            or wrong_models(server, observed)
            or _operated(server, is_cordoned=is_cordoned, is_held=of_model.is_held),
        }
        endpoint = control.discovery.states.get(server.name)
        occasional = {
            "cordoned": is_cordoned or None,
            "kv_events": control.kv_events.as_json(server.name),
            "endpoint": endpoint and endpoint.value,
        }
        shown |= {name: value for name, value in occasional.items() if value is not None}
        if status is None:
            shown |= {"hint": probe_hint(shown["reason"]) or None}
        else:
            shown |= {
                "state": status.state.value,
                "pid": status.pid,
                "restarts": status.restarts,
                "given_up": status.given_up,
                "cause": status.cause.code if status.cause else None,
                "hint": status.cause.hint if status.cause else None,
                "last_failure": asdict(status.last_failure) if status.last_failure else None,
                "progress": status.progress,
                "log": str(status.log),
            }
        return shown


def _operated(server: ConfiguredServer, *, is_cordoned: bool, is_held: bool) -> str:
    """Return which operation has taken a server out of use, and how to return it; empty if none has."""
    if is_cordoned:
        return f"out of rotation by `cordon`; return it with `vllm-gateway uncordon {server.name}`"
    return f"stopped by an operator; start it with `vllm-gateway start {server.model.id}`" if is_held else ""


def _continuations(model: str, series: SeriesValues) -> dict[str, int]:
    """Return how many streams of a model lost their server and were to be continued, by the outcome."""
    found: Counter[str] = Counter()
    for each, values in series.items():
        if each.family == "continuations_total" and each.labels[0] == model:
            found[each.labels[3]] += int(values[0])
    return dict(found)


def _split_status(split: conf.Model) -> dict[str, Any]:
    """Return a split: its names, and the models that serve it with their weights."""
    return {"id": split.id, "aliases": list(split.aliases), "models": dict(split.split or {}), "sticky": split.sticky}
