"""Probes: is a server up, and which models does it serve?

Owns one task for each target and what was last learned of it. Probes open a connection of their own each time, so
that a server that no longer accepts is noticed. The rules: ``on_change`` is called for a change and for nothing else;
a look that this process itself has no means for tells nothing of the server, and changes nothing;
a server that refuses the gateway's key is down, because every request to it would fail;
and of what a server says about its models only the id and the length are kept (``root`` is a path of its machine).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import re
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Self

from upstream.http.address import Address
from upstream.http.bounded_get import get
from upstream.http.errors import LocalLimit, UpstreamError
from upstream.vllm.capabilities import TASK_ROUTES

log = logging.getLogger(__name__)

FAILURES_UNTIL_DOWN = 2
FAILURES_UNTIL_LOST = 5
"""Looks in a row without success after which a server is not expected to come back by itself: about a minute, where each look waits ten
seconds. It is out of routing long before; a busy vLLM has been seen to take six seconds for GET /health."""
BODY_LIMIT = 1 << 20
"""Bytes of an answer that are looked at; a longer list of models is refused."""

NO_SUCH_ROUTE = (404, 405)


@dataclass(frozen=True, slots=True)
class Target:
    """A server to probe, by the name that its probes are to carry."""

    name: str
    address: Address
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model of GET /v1/models. ``max_model_len``: tokens; None where the server does not say."""

    id: str
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """What is known of a server. ``reason``: why it is down, or why its models are not known; empty otherwise. ``task``: what it is for,
    by its routes; None where they do not show it."""

    name: str
    up: bool
    reason: str = ""
    models: tuple[ModelCard, ...] = ()
    task: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One look at a server.

    ``conclusive``: nobody listens there, which a second look would only confirm. ``broken``: the server itself says that it
    does not work (5xx: vLLM's engine is dead, and does not come back). ``refused``: the server works and rejects the gateway's
    key; a second probe or a new process would give the same result.
    """

    up: bool
    reason: str = ""
    conclusive: bool = False
    broken: bool = False
    refused: bool = False
    models: tuple[ModelCard, ...] | None = None


@dataclass(frozen=True, slots=True)
class ProbeHistory:
    """The probe that counts, and how many looks since then have failed."""

    health: ServerHealth
    failures: int = 0


def apply_result(before: ProbeHistory | None, name: str, seen: ProbeResult) -> ProbeHistory:
    """The hysteresis: up after one success, down after two failures in a row; down at once where nobody listens, where the key is
    refused, or where nothing is known yet."""
    task = before.health.task if before else None
    if seen.up:
        known = before.health.models if before else ()
        return ProbeHistory(ServerHealth(name, True, seen.reason, known if seen.models is None else seen.models, task))
    failures = before.failures + 1 if before else 1
    if before and before.health.up and not (seen.conclusive or seen.refused) and failures < FAILURES_UNTIL_DOWN:
        return ProbeHistory(before.health, failures)
    return ProbeHistory(ServerHealth(name, False, seen.reason, before.health.models if before else (), task), failures)


def needs_new_process(standing: ProbeHistory, seen: ProbeResult) -> bool:
    """Whether nothing but a new process will help, by where the server stands after the look ``seen``."""
    if standing.health.up or seen.refused:
        return False
    return standing.failures >= (FAILURES_UNTIL_DOWN if seen.broken else FAILURES_UNTIL_LOST)


def read_models(body: bytes) -> tuple[ModelCard, ...]:
    """The cards in the body of GET /v1/models. Raises ValueError where it is no such list."""
    try:
        return tuple(_card(entry) for entry in json.loads(body)["data"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a list of models") from error


def _card(entry: dict[str, object]) -> ModelCard:
    name = str(entry["id"])
    length = entry.get("max_model_len")
    return ModelCard(name, length if isinstance(length, int) else None)


class HealthCheck:
    """Looks at one server. Every look has ``deadline`` seconds in all, and raises nothing that the server could cause."""

    def __init__(self, target: Target, deadline: float) -> None:
        self._target = target
        self._deadline = deadline
        # Loading the system's trust store takes tens of milliseconds: only where it is needed.
        self._tls = ssl.create_default_context() if target.address.tls else None

    async def run(self, *, models: bool = False) -> ProbeResult | None:
        """GET /health, and GET /v1/models if ``models``, or if the server has no /health; None: no connection could be opened here."""
        try:
            async with asyncio.timeout(self._deadline):
                return await self._get_health(models)
        except TimeoutError:
            return ProbeResult(False, f"no answer within {self._deadline:g} s")
        except LocalLimit as error:
            log.error("servers cannot be looked at and count as they did, since the gateway can open no connection: %s", error)
            return None
        except UpstreamError as error:
            return ProbeResult(False, str(error).removeprefix(f"{error.server}: "), conclusive=_nobody_listens(error))

    async def _get_health(self, models: bool) -> ProbeResult:
        status, _ = await self._get("/health")
        if status in NO_SUCH_ROUTE:
            return await self._get_models(ProbeResult(False))
        if not 200 <= status < 300:
            return ProbeResult(False, f"GET /health: status {status}", broken=status >= 500)
        return await self._get_models(ProbeResult(True)) if models else ProbeResult(True)

    async def _get_models(self, otherwise: ProbeResult) -> ProbeResult:
        status, body = await self._get("/v1/models")
        if status == 401 or (status == 403 and self._target.api_key is not None):  # 403 without a key: perhaps this path alone is closed
            return ProbeResult(False, f"{self._refusal()} (GET /v1/models: status {status})", refused=True)
        if not 200 <= status < 300:
            return replace(otherwise, reason=f"GET /v1/models: status {status}")
        try:
            return ProbeResult(True, models=read_models(body))
        except ValueError:
            return replace(otherwise, reason="GET /v1/models: not a list of models")

    async def detect_task(self) -> str | None:
        """What a server that is up is for: a route of POST alone answers a GET with 405. None where that does not show it."""
        try:
            async with asyncio.timeout(self._deadline):
                for path, task in TASK_ROUTES.items():
                    status, _ = await self._get(path)
                    if status != HTTPStatus.NOT_FOUND:
                        return task if status == HTTPStatus.METHOD_NOT_ALLOWED else None
        except (TimeoutError, UpstreamError):
            pass  # the next look at the models tries again
        return None

    def _refusal(self) -> str:
        if self._target.api_key is None:
            return "the server asks for a key, and the gateway has none for it"
        return "the server refused the gateway's key"

    async def _get(self, path: str) -> tuple[int, bytes]:
        target = self._target
        return await get(target.address, path, api_key=target.api_key, timeout=2 * self._deadline, tls=self._tls, limit=BODY_LIMIT)


def _nobody_listens(error: UpstreamError) -> bool:
    """Whether every address refused. asyncio tells of several that failed in one text only."""
    cause = error.__cause__
    numbers = {int(number) for number in re.findall(r"\[Errno (\d+)\]", str(cause))}
    return isinstance(cause, OSError) and bool(numbers) and numbers <= {errno.ECONNREFUSED, errno.ENOENT}


class _Watch:
    """One server under all its names: its standing, and when its models are due for a look."""

    def __init__(
        self, target: Target, on_change: Callable[[ServerHealth], None], on_lost: Callable[[ServerHealth], None], models_every: float
    ) -> None:
        self._target = target
        self.names: dict[str, None] = {}
        self._on_change = on_change
        self._on_lost = on_lost
        self._models_every = models_every
        self._models_due = 0.0
        self.history: ProbeHistory | None = None

    def start(self, interval: float, deadline: float) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(interval, deadline), name=f"probe {self._target.name}")
        return self._task

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self, interval: float, deadline: float) -> None:
        by = HealthCheck(self._target, deadline)
        while True:
            await self._probe_once(by)
            await asyncio.sleep(interval * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load, no secret

    async def _probe_once(self, by: HealthCheck) -> None:
        try:
            before = self.history.health if self.history else None
            seen = await by.run(models=time.monotonic() >= self._models_due)
            if seen is not None:
                self._record(seen)
                if seen.models is not None and (before is None or not before.up or before.task is None):
                    self._record_task(await by.detect_task())
        except Exception:  # the outer edge: a mistake about one server must not end its watch, or the others'
            log.exception("probe of %s", self._target.name)

    def _record(self, seen: ProbeResult) -> None:
        before = self.history.health if self.history else None
        self.history = apply_result(self.history, self._target.name, seen)
        if not self.history.health.up:
            self._models_due = 0.0
        elif seen.models is not None:
            self._models_due = time.monotonic() + self._models_every
        if self.history.health != before:
            self._notify(self._on_change)
        if needs_new_process(self.history, seen):
            self._notify(self._on_lost)

    def _record_task(self, task: str | None) -> None:
        standing = self.history
        if standing is not None and standing.health.task != task:
            self.history = replace(standing, health=replace(standing.health, task=task))
            self._notify(self._on_change)

    def _notify(self, listener: Callable[[ServerHealth], None]) -> None:
        for probe in self.servers():
            listener(probe)

    def servers(self) -> tuple[ServerHealth, ...]:
        """What is known, under each name."""
        standing = self.history
        return tuple(replace(standing.health, name=name) for name in self.names) if standing is not None else ()

    def set_names(self, names: dict[str, None]) -> None:
        """These are its names from now on; of what is known already the new ones are told."""
        new = names.keys() - self.names.keys()
        self.names = names
        for probe in self.servers():
            if probe.name in new:
                self._on_change(probe)


class Prober:
    """Probes every target each ``interval`` seconds (± a fifth) and tells changes to ``on_change``.

    ``on_lost`` is told, after each look, of a server for which nothing but a new process will help.
    ``deadline``: seconds for one look. ``models_every``: seconds between two looks at the models of a server that is
    up. Targets are set after entering; leaving ends every probe.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[ServerHealth], None],
        on_lost: Callable[[ServerHealth], None] = lambda _: None,
        interval: float = 2.0,
        deadline: float = 3.0,
        models_every: float = 60.0,
    ) -> None:
        self._on_change = on_change
        self._on_lost = on_lost
        self._interval = interval
        self._deadline = deadline
        self._models_every = models_every
        self._watches: dict[Target, _Watch] = {}
        """By address and key: servers that are one, because many models name it, are looked at once."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.set_targets(())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set_targets(self, targets: Iterable[Target]) -> None:
        """Probe these and no others. Those that stay (same name, address and key) keep what is known of them.

        One that has another key now begins with what was known of the server under the former one.
        No callback is made for a target that was taken away, once this has returned.
        """
        wanted: dict[Target, dict[str, None]] = {}
        for target in targets:
            wanted.setdefault(replace(target, name=""), {})[target.name] = None
        for target, names in wanted.items():
            if target not in self._watches:
                self._start(target, names)
            self._watches[target].set_names(names)
        for target in self._watches.keys() - wanted.keys():
            self._watches.pop(target).stop()

    def _start(self, target: Target, names: dict[str, None]) -> None:
        before = next((watch for other, watch in self._watches.items() if other.address == target.address), None)
        named = replace(target, name=next(iter(names)))
        self._watches[target] = watch = _Watch(named, self._on_change, self._on_lost, self._models_every)
        if before is not None:
            watch.history, watch.names = before.history, before.names
        task = watch.start(self._interval, self._deadline)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def servers(self) -> tuple[ServerHealth, ...]:
        """What is known now; a target that has not been looked at yet is not among them."""
        return tuple(probe for watch in self._watches.values() for probe in watch.servers())
