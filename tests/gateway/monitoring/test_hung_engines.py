"""An engine that hangs is detected behind a healthy API server. A slow engine or a suspended gateway raises no alarm."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import httpx2
import pytest

from gateway.monitoring.hung_engines import SILENCE, Silence
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.upstream.simulator.test_process import Simulated, running
from upstream.balancing.attempt import UpstreamResponse
from upstream.balancing.server import Progress, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import TICK, Timeouts
from upstream.simulator.engine.batch import Batch, BatchLimits, StepTime
from upstream.vllm.engine_counters import EngineCounters

COUNTERS = EngineCounters(0, 10, 10, 0, 0, 0, 1)
LONG = 180.0  # seconds that a busy machine may take


def silent(seconds: int, prefill: float = 0.0) -> Silence:
    """Return a server for which one response has been awaited for these seconds."""
    silence = Silence(1.0)
    for _ in range(2 * seconds):
        silence.observe(Progress(1.0, prefill), 0.5)
        silence.observe_counters(COUNTERS)
    return silence


def test_a_silence_is_suspicious_unless_something_has_changed() -> None:
    assert not silent(4).needs_canary() and silent(5).needs_canary()
    with_byte, with_token = silent(5), silent(5)
    with_byte.observe(Progress(2.0, 0.0), 0.5)
    with_token.observe_counters(replace(COUNTERS, completion=11))
    assert with_byte.seconds == with_token.seconds == 0.0


def test_a_predicted_prefill_prolongs_the_silence() -> None:
    assert not silent(59, prefill=20.0).needs_canary() and silent(60, prefill=20.0).needs_canary()


def test_a_cleared_suspicion_needs_twice_the_silence_until_there_is_progress() -> None:
    silence = silent(5)
    silence.clear()
    assert silence.caution == 2.0
    silence.observe(Progress(2.0, 0.0), 0.5)
    assert silence.caution == 1.0


def test_the_time_in_which_the_gateway_was_suspended_does_not_count() -> None:
    silence = silent(1)
    silence.observe(Progress(1.0, 0.0), 3600.0)
    assert silence.seconds < SILENCE and not silence.needs_canary()


def test_the_prefill_is_predicted_by_measurements() -> None:
    server = Server(ServerSpec("m#0", Address(port=1), "m"))
    assert server.take_progress() is None
    predictions = []
    for _ in range(2):
        server.waited_for, server.waiting_bytes = True, 400_000
        progress = server.take_progress()
        assert progress is not None
        predictions.append(progress.prefill)
        for _ in range(20):
            server.measure_prefill(400_000, 10.0)
    assert predictions[0] == 200.0 and 10.0 <= predictions[1] < 11.0
    server.measure_prefill(400_000, 1e9)
    assert server.take_progress() is None


class HourOfLoad:
    """An hour of one server in virtual time: the scheduler of the simulated engine, and the gateway's observation of its responses.

    ``speed``: tokens of prompts that the engine computes in a second. Busy and quiet minutes alternate. A prompt has up to 100,000 tokens,
    of which most are cached for half of the prompts, so the measured speed is far too high for the others.
    """

    def __init__(self, random: Random, speed: float) -> None:
        self._random = random
        self._step_time = StepTime(0.01, 0.0002, 1 / speed)
        self._computed: dict[int, int] = {}
        """The tokens of a prompt that are not cached, by the number of its request."""
        self._batch = Batch[int](self._step_time, BatchLimits(), self._computed.__getitem__)
        self._server = Server(ServerSpec("m#0", Address(port=1), "m"))
        self._responses: dict[int, tuple[UpstreamResponse, bool]] = {}
        self._silence: Silence | None = None
        self._now = self._tokens_at = 1.0
        self._prompt = self._completion = self._cached = 0
        self._tokens = 0, 0
        self.longest = 0.0
        """The longest time in seconds in which a response was awaited and no token was counted."""
        self.suspicions = 0

    def run(self) -> None:
        """Play the hour."""
        arrivals, tick = deque(self._arrivals()), self._now
        while self._now < 3600.0:
            while arrivals and arrivals[0] <= self._now:
                arrivals.popleft()
                self._add()
            seconds = self._batch.begin_step()
            if seconds is None:
                self._now = arrivals[0] if arrivals else 3600.0
            else:
                self._now += seconds
                self._complete(seconds)
            while tick + TICK <= self._now:
                tick += TICK
                self._observe(tick)

    def _observe(self, now: float) -> None:
        """Do what the worker and control do: report the progress of responses, and look for a silence."""
        for response, _ in self._responses.values():
            response.check(now)
        progress = self._server.take_progress()
        tokens = self._prompt, self._completion
        if progress is None or tokens != self._tokens:
            self._tokens, self._tokens_at = tokens, now
        self.longest = max(self.longest, now - self._tokens_at)
        if progress is None:
            self._silence = None
            return
        silence = self._silence = self._silence or Silence(progress.last_byte_at)
        silence.observe(progress, TICK)
        if silence.seconds >= 1.0:
            silence.observe_counters(EngineCounters(0, *tokens, 0, 0, None, 1, self._cached / 1e7))
        if silence.needs_canary():
            self.suspicions += 1
            silence.clear()

    def _arrivals(self) -> Iterator[float]:
        at = 1.0
        while at < 3500.0:
            at += self._random.expovariate(0.5 if int(at) // 60 % 2 else 0.05)
            yield at

    def _add(self) -> None:
        number, random = len(self._computed), self._random
        tokens = 100_000 if random.random() < 0.05 else round(random.lognormvariate(6.5, 1.5)) % 100_000 + 1
        self._computed[number] = max(tokens // 100, 1) if random.random() < 0.5 else tokens
        nothing, streams = cast("Any", None), random.random() < 0.7
        response = UpstreamResponse(
            self._server, nothing, Timeouts(first_byte=1e6, idle=1e6, total=1e6), sent_at=self._now, size=4 * tokens
        )
        response.content_type = b"text/event-stream" if streams else b"application/json"
        self._responses[number] = response, streams
        self._batch.add(number, random.randrange(1, 400))

    def _complete(self, seconds: float) -> None:
        """End a step: each request that generates has one more token, and its client a byte if it streams."""
        generating = list(self._batch.generating)
        self._cached += round((seconds - self._step_time.seconds(self._batch.running, 0)) / self._step_time.per_prefill_token)
        done = self._batch.complete()
        for number in (*generating, *done.first):
            response, streams = self._responses[number]
            self._completion += 1
            if streams:
                response.last_byte_at = self._now
        self._prompt += sum(self._computed[number] for number in done.first)
        for number in done.finished:
            self._responses.pop(number)


@pytest.mark.parametrize("speed", [1_500.0, 8_000.0, 40_000.0])
def test_an_hour_of_mixed_load_raises_no_suspicion(speed: float) -> None:
    hour = HourOfLoad(Random(1), speed)
    hour.run()
    assert hour.suspicions == 0
    assert hour.longest > (SILENCE if speed < 20_000.0 else 1.0), "prompts are long enough for this engine"


@contextmanager
def requesting(one: Gateway, **body: Any) -> Iterator[list[httpx2.Response]]:
    """Send a request during the block. It ends with its response, or with the gateway."""
    replies: list[httpx2.Response] = []
    thread = threading.Thread(target=lambda: replies.append(one.request(timeout=LONG, **body)))
    thread.start()
    try:
        yield replies
    finally:
        thread.join(LONG)


def test_a_launched_server_with_a_hung_engine_is_replaced(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched("sim/one", **{"sim-hang-before-headers": True}))) as one:
        assert one.get("/status").json()["models"][0]["servers"][0]["condition"] == "up"
        with requesting(one) as replies:

            def failure() -> Any:
                return one.get("/status").json()["models"][0]["servers"][0]["last_failure"]

            found = wait_for(failure, LONG, why=lambda: one.output)
        assert found["cause"] == "engine_hung" and "no response to a request for one token" in found["line"]
        assert len(replies) == 1, "the request has ended with the server"
        assert one.metric('vllm_gateway_launch_failures_total{cause="engine_hung",model="sim/one"}') == 1


def test_a_hung_server_is_out_of_rotation_until_it_recovers(tmp_path: Path) -> None:
    with running() as hung, running() as other:
        servers = [{"url": each.url, "model": "tiny"} for each in (hung, other)]
        model = {"id": "sim/one", "servers": servers, "balance": "round_robin"}
        with gateway(tmp_path, configuration(model)) as one:
            up = f'vllm_gateway_server_up{{model="sim/one",server="{hung.url}"}}'
            wait_for(lambda: one.metric(up) == 1 and one.output.count(" is up\n") == 2, LONG)
            os.kill(hung.process.pid, signal.SIGSTOP)
            try:
                with requesting(one), requesting(one):  # the server gets the first or the second
                    wait_for(lambda: f"{hung.url} is down: its engine makes no progress" in one.output, LONG, why=lambda: one.output)
                    wait_for(lambda: one.metric(up) == 0)
                    for _ in range(4):
                        assert one.request().status_code == 200
                    os.kill(hung.process.pid, signal.SIGCONT)
            finally:
                os.kill(hung.process.pid, signal.SIGCONT)
            wait_for(lambda: one.metric(up) == 1, LONG, why=lambda: one.output)


def canaries(server: Simulated) -> int:
    return sum(entry["path"] == "/v1/completions" for entry in server.requests())


def test_a_slow_response_of_an_engine_that_works_is_cleared_by_the_canary(tmp_path: Path) -> None:
    with running() as server:
        model = {"id": "sim/one", "servers": [{"url": server.url, "model": "tiny"}]}
        with gateway(tmp_path, configuration(model)) as one, requesting(one, simulate={"time_to_first_token": 15}) as replies:
            wait_for(lambda: canaries(server) > 0, LONG, why=lambda: one.output)
            assert one.metric(f'vllm_gateway_server_up{{model="sim/one",server="{server.url}"}}') == 1
        assert replies[0].status_code == 200 and "makes no progress" not in one.output
