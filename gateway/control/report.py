"""What the admin port shows of the gateway: its metrics, its status, its keys and their use. Nothing is changed from here.

The rule: everything is of the moment in which it is asked for, and comes from whoever owns it; nothing is kept here.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from gateway import __version__
from gateway import config as conf
from gateway.admin.engine_metrics import Engine
from gateway.control.control import Control
from gateway.control.discovery import discovered
from gateway.control.worker_processes import process_series
from gateway.fleet import plan
from gateway.key_management.key_list import LastUse, expiry, list_keys
from gateway.telemetry.metrics import Series, sum_series
from upstream.balancing.server import Condition

_HEARD = 0.5  # seconds a status waits for a worker that has not heard yet of what is shown
_COUNTED_BY_WORKERS = ("server_inflight", "server_ejected")  # of a server that no worker has counted yet they are 0


class Report:
    """The admin port's ``Overview`` of what control knows."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def not_ready(self) -> str | None:
        return self._control.not_ready()

    def degraded(self) -> list[str]:
        return self._control.degraded()

    def series(self) -> Mapping[Series, Sequence[float]]:
        control = self._control
        series: dict[Series, Sequence[float]] = self._without_gone_ones(sum_series(control.workers.boards))
        for one, value in (*self._of_servers(), *self._of_control()):
            series[one] = (value,)
        for place in plan.places(control.config):
            for family in _COUNTED_BY_WORKERS:
                series.setdefault(Series(family, (place.model.id, place.name)), (0,))
        return series if control.ledger is None else series | control.ledger.series()

    def _of_servers(self) -> Iterator[tuple[Series, float]]:
        known = self._control.known
        for place in plan.places(self._control.config):
            condition, labels = plan.condition(place.name, known), (place.model.id, place.name)
            yield Series("server_up", labels), float(condition is Condition.UP)
            yield Series("server_out_of_rotation", labels), float(condition is Condition.OUT_OF_ROTATION)
            if place.server is None:
                status = known.launched.get(place.name)
                yield Series("server_restarts_total", labels), status.restarts if status else 0
        ready = plan.ready_servers(self._control.config, known)
        yield from ((Series("ready_servers", (model,)), count) for model, count in ready.items())

    def _of_control(self) -> Iterator[tuple[Series, float]]:
        control = self._control
        yield from ((Series("discovery_up", (model,)), float(well)) for model, well in control.discovery.well(control.config))
        yield from ((Series("key_set_up", (issuer,)), float(well)) for issuer, well in control.key_sets.well())
        yield from control.observe_dependencies().series()
        yield from ((Series("launches_total", outcome), count) for outcome, count in control.launches.items())
        yield from ((Series("launch_failures_total", cause), count) for cause, count in control.launch_failures.items())
        yield from ((Series("config_reloads_total", (result,)), count) for result, count in control.history.counts.items())
        yield Series("config_last_reload_successful", ()), float(control.history.last.successful)
        ends = ((key.id, expiry(key)) for key in control.config.keys)
        yield from ((Series("key_expires_timestamp_seconds", (key,)), last.timestamp()) for key, last in ends if last is not None)
        yield Series("worker_restarts_total", ()), sum(worker.restarts for worker in control.workers.statuses)
        yield from process_series(control.workers.statuses)
        yield Series("build_info", (__version__,)), 1

    def _without_gone_ones(self, series: Mapping[Series, list[float]]) -> dict[Series, Sequence[float]]:
        """Where servers come and go, those that are gone and have nothing in flight are shown no more; their counts stay for one that
        comes under the same name."""
        found = {model.id for model, _ in discovered(self._control.config)}
        there = {(place.model.id, place.name) for place in plan.places(self._control.config)}
        busy = {one.labels for one, values in series.items() if one.family == "server_inflight" and values[0]}
        return {
            one: values
            for one, values in series.items()
            if not (one.family.startswith("server_") and one.labels[0] in found) or one.labels[:2] in there or one.labels[:2] in busy
        }

    async def usage(self, words: Mapping[str, str]) -> dict[str, Any] | None:
        return None if self._control.ledger is None else await self._control.ledger.usage(words)

    async def keys(self) -> dict[str, Any]:
        control = self._control
        use = LastUse({}, "no ledger is configured") if control.ledger is None else await control.ledger.last_use(control.config)
        return list_keys(control.config, use, datetime.now(UTC))

    def engines(self) -> dict[str, Engine]:
        control = self._control
        models = {place.name: place.model.id for place in plan.places(control.config)}
        targets = plan.targets(control.config, control.known)
        return {target.name: Engine(models.get(target.name) or plan.launched_model(target.name), target) for target in targets}

    def status(self) -> dict[str, Any]:
        control = self._control
        known, series, reason = control.known, sum_series(control.workers.boards), control.not_ready()
        places: dict[str, list[plan.Place]] = defaultdict(list)
        for place in plan.places(control.config):
            places[place.model.id].append(place)
        return {
            "version": __version__,
            "time": time.time(),
            "started": control.started,
            "ready": reason is None,
            "reason": reason,
            "degraded": control.degraded(),
            "dependencies": control.observe_dependencies().shown(),
            "snapshot_version": control.version,
            "configuration": control.history.last.shown(),
            "ledger": None if control.ledger is None else control.ledger.status(),
            "issuers": control.key_sets.shown(control.config),
            "workers": [
                {
                    "number": worker.number,
                    "pid": worker.pid,
                    "up": worker.up,
                    "snapshot_version": worker.version,
                    "restarts": worker.restarts,
                }
                for worker in control.workers.statuses
            ],
            "models": [self._model_status(model, places[model.id], known, series) for model in control.config.models],
        }

    async def status_with_logs(self) -> dict[str, Any]:
        shown, launcher = self.status(), self._control.launcher
        await self._control.workers.wait_applied(self._control.tell_health(), _HEARD)  # what is shown as ready is served
        launched = [server for model in shown["models"] for server in model["servers"] if "log" in server]
        logs = [launcher.log(server["name"]) for server in launched]
        tails = await asyncio.to_thread(lambda: [log.tail() for log in logs])
        for server, tail in zip(launched, tails, strict=True):
            server["last_log_lines"] = tail.splitlines()
        return shown

    def _model_status(
        self, model: conf.Model, places: Sequence[plan.Place], known: plan.Knowledge, series: Mapping[Series, Sequence[float]]
    ) -> dict[str, Any]:
        control = self._control
        standing = control.fleet.standing(model.id)
        return {
            **self._traffic(model.id, series),
            "max_inflight": model.max_inflight,
            "aliases": list(model.aliases),
            "state": standing.state.value,
            "since": standing.since,
            "queued": standing.queued,
            "waiting_s": standing.waiting,
            "discovery": control.discovery.shown(model),
            "loras": [self._traffic(lora.id, series) | {"aliases": list(lora.aliases)} for lora in model.loras],
            "servers": [self._server_status(place, standing.since, known, series) for place in places],
        }

    def _traffic(self, model: str, series: Mapping[Series, Sequence[float]]) -> dict[str, Any]:
        in_flight = int(series.get(Series("inflight_requests", (model,)), (0,))[0])
        return {"id": model, "in_flight": in_flight, "tokens_per_second": asdict(self._control.rates.rate(model))}

    def _server_status(
        self, place: plan.Place, model_since: float, known: plan.Knowledge, series: Mapping[Series, Sequence[float]]
    ) -> dict[str, Any]:
        """A server's entry. One that is put away is as its model is, which changes meanwhile: it drains before it is stopped."""
        control, condition = self._control, plan.condition(place.name, known)
        status, probe = known.launched.get(place.name), known.probes.get(place.name)
        moments = [control.changed_at.get(place.name, 0.0), status.since if status else 0.0]
        if condition is Condition.OUT_OF_ROTATION:
            moments.append(model_since)
        shown: dict[str, Any] = {
            "name": place.name,
            "condition": condition.value,
            "in_flight": int(series.get(Series("server_inflight", (place.model.id, place.name)), (0,))[0]),
            "ejected_by": int(series.get(Series("server_ejected", (place.model.id, place.name)), (0,))[0]),
            "since": max(moments) or None,
            "reason": (status.reason if status else "") or (probe.reason if probe else ""),
        }
        standing = control.discovery.standing(place.name)
        if standing is not None:
            shown |= {"endpoint": standing.value}
        if status is not None:
            shown |= {
                "state": status.state.value,
                "pid": status.pid,
                "restarts": status.restarts,
                "given_up": status.given_up,
                "cause": status.cause.code if status.cause else None,
                "hint": status.cause.hint if status.cause else None,
                "progress": status.progress,
                "log": str(status.log),
            }
        return shown
