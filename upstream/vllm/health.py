"""Health probes: whether a server is up, and which models it serves.

Owns a task for each target and its last known health. Each probe opens a new connection, so a server that no longer accepts connections is
noticed. The rules: ``on_change`` is called only for a change. A probe that fails because of this process's own limits changes nothing. A
server that rejects the gateway's key is down, because every request to it would fail. Only the id and the length of a server's models are
stored (``root`` is a path on its machine).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import random
import re
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Self

from upstream.http.address import Address
from upstream.http.errors import LocalLimit, UpstreamError
from upstream.vllm.bounded_request import fetch
from upstream.vllm.capabilities import SCALE_OUT_ROUTE, TASK_ROUTES

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

FAILURES_UNTIL_DOWN = 2
FAILURES_UNTIL_LOST = 5
"""Failed probes in a row after which a server is not expected to recover by itself: about a minute if each probe waits ten seconds. The
server is out of rotation long before. A busy vLLM can take six seconds for GET /health."""
BODY_LIMIT = 1 << 20
"""Bytes of a response that are read. A longer list of models is rejected."""

NO_SUCH_ROUTE = (404, 405)


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A server to probe, and the name under which its health is reported."""

    name: str
    address: Address
    api_key: str | None = field(default=None, repr=False)

    def client(self, timeout: float | None) -> httpx2.AsyncClient:
        """Return an HTTP client for what is not probed. ``timeout``: seconds for each step of a request."""
        import httpx2  # loaded only where it is used

        trust = ssl.create_default_context() if self.address.tls else False
        transport = httpx2.AsyncHTTPTransport(uds=self.address.uds, verify=trust, trust_env=False)
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return httpx2.AsyncClient(transport=transport, base_url=self.address.base_url, headers=headers, timeout=timeout, trust_env=False)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model of GET /v1/models. ``max_model_len``: tokens; None if the server does not report it.

    ``root``: a digest of what the server loads. That may be a path, which nothing may show.
    """

    id: str
    max_model_len: int | None = None
    root: str = ""


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """The health of a server.

    ``reason``: why it is down, or why its models are unknown; empty otherwise. ``task``: the server's task, derived from its routes; None
    if they do not show it. ``scale_out``: it has vLLM's scale-out routes.
    """

    name: str
    up: bool
    reason: str = ""
    models: tuple[ModelCard, ...] = ()
    task: str | None = None
    scale_out: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe.

    ``conclusive``: no process listens, which a second probe would confirm. ``broken``: the server reports that it does not work (5xx:
    vLLM's engine is dead and does not recover). ``refused``: the server works and rejects the gateway's key; a second probe or a new
    process would give the same result.
    """

    up: bool
    reason: str = ""
    conclusive: bool = False
    broken: bool = False
    refused: bool = False
    models: tuple[ModelCard, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProbeHistory:
    """The health by the last probe that counted, and the number of failed probes since then."""

    health: ServerHealth
    failures: int = 0


def apply_result(before: ProbeHistory | None, name: str, seen: ProbeResult) -> ProbeHistory:
    """Return the history after another probe.

    A server is up after one success, and down after two failures in a row. It is down immediately if no process listens, if it rejects the
    key, or if nothing is known yet.
    """
    known = replace(before.health, name=name) if before else ServerHealth(name, False)
    if seen.up:
        return ProbeHistory(replace(known, up=True, reason=seen.reason, models=known.models if seen.models is None else seen.models))
    failures = before.failures + 1 if before else 1
    if before and before.health.up and not (seen.conclusive or seen.refused) and failures < FAILURES_UNTIL_DOWN:
        return ProbeHistory(before.health, failures)
    return ProbeHistory(replace(known, up=False, reason=seen.reason), failures)


def needs_new_process(history: ProbeHistory, seen: ProbeResult) -> bool:
    """Return whether only a new process can help, according to the history after the probe ``seen``."""
    if history.health.up or seen.refused:
        return False
    return history.failures >= (FAILURES_UNTIL_DOWN if seen.broken else FAILURES_UNTIL_LOST)


def read_models(body: bytes) -> tuple[ModelCard, ...]:
    """Return the cards in the body of GET /v1/models. Raises ValueError if it is not a list of models."""
    try:
        return tuple(_card(entry) for entry in json.loads(body)["data"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a list of models") from error


def _card(entry: dict[str, object]) -> ModelCard:
    name = str(entry["id"])
    length, root = entry.get("max_model_len"), entry.get("root")
    digest = hashlib.sha256(root.encode(errors="replace")).hexdigest() if isinstance(root, str) else ""
    return ModelCard(name, length if isinstance(length, int) else None, digest)


class HealthCheck:
    """Probes one server. A probe takes at most ``deadline`` seconds, and raises no exception that the server could cause."""

    def __init__(self, target: ProbeTarget, deadline: float) -> None:
        self._target = target
        self._deadline = deadline
        # Loading the system's trust store takes tens of milliseconds, so it is loaded only for TLS.
        self._tls = ssl.create_default_context() if target.address.tls else None

    async def run(self, *, models: bool = False) -> ProbeResult | None:
        """Send GET /health, and GET /v1/models if ``models``, or if the server has no /health.

        None if this process cannot open a connection.
        """
        try:
            async with asyncio.timeout(self._deadline):
                return await self._get_health(models)
        except TimeoutError:
            return ProbeResult(False, f"no response within {self._deadline:g} s")
        except LocalLimit as error:
            log.error("servers cannot be probed and keep their last state, because the gateway cannot open connections: %s", error)
            return None
        except UpstreamError as error:
            return ProbeResult(False, str(error).removeprefix(f"{error.server}: "), conclusive=_no_listener(error))

    async def _get_health(self, models: bool) -> ProbeResult:
        status, _ = await self._get("/health")
        if status in NO_SUCH_ROUTE:
            return await self._get_models(ProbeResult(False))
        if not 200 <= status < 300:
            return ProbeResult(False, f"GET /health: status {status}", broken=status >= 500)
        return await self._get_models(ProbeResult(True)) if models else ProbeResult(True)

    async def _get_models(self, default: ProbeResult) -> ProbeResult:
        status, body = await self._get("/v1/models")
        key = self._target.api_key
        if status == 401 or (status == 403 and key is not None):  # 403 without a key may concern this path alone
            why = "the server requires a key, and the gateway has none for it" if key is None else "the server rejected the gateway's key"
            return ProbeResult(False, f"{why} (GET /v1/models: status {status})", refused=True)
        if not 200 <= status < 300:
            return replace(default, reason=f"GET /v1/models: status {status}")
        try:
            return ProbeResult(True, models=read_models(body))
        except ValueError:
            return replace(default, reason="GET /v1/models: not a list of models")

    async def detect_routes(self) -> tuple[str | None, bool]:
        """Return the task of a server that is up, and whether it has the scale-out routes.

        A POST route returns 405 for a GET. The task is None if the routes do not show it.
        """
        with suppress(TimeoutError, UpstreamError):  # the next probe of the models tries again
            async with asyncio.timeout(self._deadline):
                for path, task in TASK_ROUTES.items():
                    status, _ = await self._get(path)
                    if status == HTTPStatus.METHOD_NOT_ALLOWED:
                        return task, task == "chat" and await self._has_scale_out()
                    if status != HTTPStatus.NOT_FOUND:
                        break
        return None, False

    async def _has_scale_out(self) -> bool:
        status, _ = await self._get(SCALE_OUT_ROUTE, posted="{}")
        return status == HTTPStatus.BAD_REQUEST

    async def _get(self, path: str, posted: str | None = None) -> tuple[int, bytes]:
        address, key = self._target.address, self._target.api_key
        return await fetch(address, path, api_key=key, timeout=2 * self._deadline, tls=self._tls, limit=BODY_LIMIT, posted=posted)


def _no_listener(error: UpstreamError) -> bool:
    """Return whether every address refused. asyncio reports the failures of several addresses as one text."""
    cause = error.__cause__
    numbers = {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(cause))}
    return isinstance(cause, OSError) and bool(numbers) and numbers <= {errno.ECONNREFUSED, errno.ENOENT}


class _ServerProbe:
    """The probes of one server, under all its names: its history, and the time of the next probe of its models.

    ``before``: the probes of the same address with the former key.
    """

    def __init__(self, prober: Prober, target: ProbeTarget, before: _ServerProbe | None) -> None:
        self._prober = prober
        self._target = target
        self.names: dict[str, None] = before.names if before else {}
        self.history: ProbeHistory | None = before.history if before else None
        self._models_due = 0.0
        self.task = asyncio.create_task(self._run(), name=f"probe {target.name}")

    async def _run(self) -> None:
        check = HealthCheck(self._target, self._prober.deadline)
        while True:
            await self._probe_once(check)
            await asyncio.sleep(self._prober.interval * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load, no secret

    async def _probe_once(self, check: HealthCheck) -> None:
        try:
            before = self.history.health if self.history else None
            if (seen := await check.run(models=time.monotonic() >= self._models_due)) is not None:
                self._record(seen, before)
                if seen.models is not None and (before is None or not before.up or before.task is None):
                    self._record_routes(*await check.detect_routes())
        except Exception:  # the outer edge: a bug with one server must not end its probes, or those of others
            log.exception("probe of %s", self._target.name)

    def _record(self, seen: ProbeResult, before: ServerHealth | None) -> None:
        self.history = apply_result(self.history, self._target.name, seen)
        if not self.history.health.up:
            self._models_due = 0.0
        elif seen.models is not None:
            self._models_due = time.monotonic() + self._prober.models_every
        if self.history.health != before:
            self._notify(self._prober.on_change)
        if needs_new_process(self.history, seen):
            self._notify(self._prober.on_lost)

    def _record_routes(self, task: str | None, scale_out: bool) -> None:
        history = self.history
        if history is not None and history.health != (health := replace(history.health, task=task, scale_out=scale_out)):
            self.history = replace(history, health=health)
            self._notify(self._prober.on_change)

    def _notify(self, listener: Callable[[ServerHealth], None]) -> None:
        for probe in self.servers():
            listener(probe)

    def servers(self) -> tuple[ServerHealth, ...]:
        """Return the health under each name."""
        history = self.history
        return tuple(replace(history.health, name=name) for name in self.names) if history is not None else ()

    def set_names(self, names: dict[str, None]) -> None:
        """Set the server's names, and report the known health under the new ones."""
        new = names.keys() - self.names.keys()
        self.names = names
        for probe in self.servers():
            if probe.name in new:
                self._prober.on_change(probe)


@dataclass(kw_only=True, eq=False)
class Prober:
    """Probes every target each ``interval`` seconds (± a fifth), and reports changes to ``on_change``.

    ``on_lost`` is called after each probe of a server that only a new process can help. ``deadline``: seconds for one probe.
    ``models_every``: seconds between two probes of the models of a server that is up. Targets are set after entering. Exiting ends every
    probe.
    """

    on_change: Callable[[ServerHealth], None]
    on_lost: Callable[[ServerHealth], None] = lambda _: None
    interval: float = 2.0
    deadline: float = 3.0
    models_every: float = 60.0
    _probes: dict[ProbeTarget, _ServerProbe] = field(init=False, default_factory=dict)
    """Probes by address and key, because a server of several models is probed only once."""
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.set_targets(())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set_targets(self, targets: Iterable[ProbeTarget]) -> None:
        """Probe exactly these targets. Targets that stay (same name, address and key) keep their health.

        A target with a new key starts with the health that it had with the former key. After this method has returned, no callback is
        called for a removed target.
        """
        wanted: dict[ProbeTarget, dict[str, None]] = {}
        for target in targets:
            wanted.setdefault(replace(target, name=""), {})[target.name] = None
        for target, names in wanted.items():
            if target not in self._probes:
                before = next((probe for other, probe in self._probes.items() if other.address == target.address), None)
                probe = self._probes[target] = _ServerProbe(self, replace(target, name=next(iter(names))), before)
                self._tasks.add(probe.task)
                probe.task.add_done_callback(self._tasks.discard)
            self._probes[target].set_names(names)
        for target in self._probes.keys() - wanted.keys():
            self._probes.pop(target).task.cancel()

    def servers(self) -> tuple[ServerHealth, ...]:
        """Return the health of every target that has been probed."""
        return tuple(health for probe in self._probes.values() for health in probe.servers())
