"""Detect engines that hang while their server still responds to health checks.

An engine is suspected if responses are awaited, no byte of any response arrives, and its token counters and the usage of its KV cache do
not change, for the longer of ``SILENCE`` and three times the predicted prefill. A canary, a request for one token on another connection,
confirms or clears it.

The rules: a server leaves the rotation only if a canary gets no response, and returns with the first response to a canary. Time
counts only while the gateway runs, so a gateway that was suspended suspects no engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import httpx2

from gateway.admin.engine_metrics import Engine
from gateway.system.tasks import cancel
from upstream.balancing.server import Progress
from upstream.vllm import metrics_request
from upstream.vllm.engine_counters import EngineCounters, parse_counters
from upstream.vllm.failures import HUNG

SILENCE = 5.0
"""Seconds without any progress after which an engine is suspected."""
_PREFILLS = 3.0  # times the predicted prefill, the same
_INTERVAL = 0.5  # seconds between two passes
_LONGEST_STEP = 1.0  # seconds that one pass can add to a silence
_COUNTED_FROM = 1.0  # seconds of silence from which the token counters are read
_METRICS_TIMEOUT = 1.0  # seconds
_CANARY_TIMEOUT = 2.5  # seconds; the predicted prefill if that is longer
_MOST_CAUTION = 8.0  # factor of the silence, which doubles with each cleared suspicion
_log = logging.getLogger("vllm_gateway.control")

_CANARIES: Mapping[str | None, tuple[str, Mapping[str, object]]] = {
    None: ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "chat": ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "embedding": ("/v1/embeddings", {"input": "a"}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["a"]}),
    "classify": ("/classify", {"input": "a"}),
}
"""The path and the body of a canary by the server's task."""


@dataclass(slots=True)
class Silence:
    """The silence of one server: the seconds without progress, and what would have changed with progress."""

    last_byte_at: float
    prefill: float = 0.0
    seconds: float = 0.0
    counters: EngineCounters | None = None
    caution: float = 1.0
    is_hung: bool = False

    def observe(self, progress: Progress, elapsed: float) -> None:
        """Observe the awaited responses."""
        self.prefill = progress.prefill
        if progress.last_byte_at != self.last_byte_at:
            self.last_byte_at, self.caution = progress.last_byte_at, 1.0
            self.restart()
        else:
            self.seconds += min(elapsed, _LONGEST_STEP)

    def observe_counters(self, counters: EngineCounters | None) -> None:
        """Observe the engine's counters, which change with each step of a prefill. None: they could not be read."""
        if self.counters is not None and counters is not None and counters != self.counters:
            self.restart()
        self.counters = counters or self.counters

    def restart(self) -> None:
        """Begin again: there was progress, or the engine has proved that it works."""
        self.seconds, self.counters = 0.0, None

    def clear(self) -> None:
        """Clear a suspicion. The next one needs a longer silence, unless there is progress before."""
        self.caution = min(2 * self.caution, _MOST_CAUTION)
        self.restart()

    def needs_canary(self) -> bool:
        """Return whether a canary is due."""
        return self.is_hung or self.seconds >= self.caution * max(SILENCE, _PREFILLS * self.prefill)


@dataclass(eq=False, slots=True)
class HungEngines:
    """Watches all servers with awaited responses.

    ``engines`` returns the servers that are up, ``progress`` the progress of responses, and ``served`` the name and task of a server's
    model. ``on_hung`` gets a server and the reason, ``on_recovered`` a server.
    """

    _engines: Callable[[], Mapping[str, Engine]]
    _progress: Callable[[], Mapping[str, Progress]]
    _served: Callable[[str], tuple[str, str | None]]
    _on_hung: Callable[[str, str], None]
    _on_recovered: Callable[[str], None]
    _silences: dict[str, Silence] = field(default_factory=dict)
    _inspections: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch until cancelled."""
        before = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_INTERVAL)
                now = time.monotonic()
                try:
                    self._run_pass(now - before)
                except Exception:  # noqa: BLE001  the outer edge: a bug with one server must not end the others' detection
                    _log.exception("hung engines could not be detected")
                before = now
        finally:
            await cancel(*self._inspections.values())

    def _run_pass(self, elapsed: float) -> None:
        progress, engines = self._progress(), self._engines()
        for name, silence in list(self._silences.items()):
            if name not in engines or (name not in progress and not silence.is_hung):
                self._forget(name)
        for name, one in progress.items():
            if name in engines:
                self._silences.setdefault(name, Silence(one.last_byte_at)).observe(one, elapsed)
        for name, silence in self._silences.items():
            if name not in self._inspections and (silence.is_hung or silence.seconds >= _COUNTED_FROM):
                task = self._inspections[name] = asyncio.create_task(self._inspect(name, engines[name], silence), name=f"inspect {name}")
                task.add_done_callback(partial(self._inspected, name))

    def _inspected(self, name: str, _: asyncio.Task[None]) -> None:
        del self._inspections[name]

    def _forget(self, name: str) -> None:
        """Forget a server that is not waited for, or that is not up any more: its health checks or its restart decide."""
        if self._silences.pop(name).is_hung:
            self._on_recovered(name)
        if (task := self._inspections.get(name)) is not None:
            task.cancel()

    async def _inspect(self, name: str, engine: Engine, silence: Silence) -> None:
        """Read the counters of a silent server, and send a canary if the silence is suspicious."""
        if not silence.is_hung:
            silence.observe_counters(await _counters(engine))
        if not silence.needs_canary():
            return
        was_hung, responds = silence.is_hung, await self._responds(name, engine, silence)
        if responds and was_hung:
            silence.is_hung = False
            silence.restart()
            self._on_recovered(name)
        elif responds:
            silence.clear()
        elif silence.needs_canary() and not was_hung:  # no byte has arrived meanwhile
            silence.is_hung = True
            self._on_hung(name, f"{HUNG}: no byte and no token for {silence.seconds:.0f} s, and no response to a request for one token")

    async def _responds(self, name: str, engine: Engine, silence: Silence) -> bool:
        """Return whether the engine responds to a canary. A server that the canary cannot reach counts as responding.

        Its health checks find what is wrong with it.
        """
        model, task = self._served(name)
        if task not in _CANARIES:
            return True
        path, body = _CANARIES[task]
        try:
            async with engine.target.client(None) as client, asyncio.timeout(max(_CANARY_TIMEOUT, silence.prefill)):
                await client.post(path, json={"model": model, **body})
        except TimeoutError:
            return False
        except httpx2.HTTPError:
            pass
        return True


async def _counters(engine: Engine) -> EngineCounters | None:
    text = await metrics_request.read_if_available(engine.target, _METRICS_TIMEOUT)
    return None if text is None else parse_counters(text)
