"""A rolling restart of three servers under long streams, with real processes: how long it takes, and whether a client notices it.

The rule: the streams last longer than the restart, so each server has some when it is drained.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.process import Gateway, gateway, launched, wait_for
from tests.support.process import configuration as whole
from tests.support.running import MODEL
from tests.support.wire import Reply, request, request_once
from tests.upstream.simulator.test_process import running
from upstream.http.sse import data_of, split

REPLICAS = 3
WITHIN = 600.0  # seconds that a busy machine may take
FLAGS = {"sim-tokens": 0, "sim-tokens-per-second": 0, "max-model-len": 8192}


@dataclass(frozen=True, slots=True)
class Restart:
    """The seconds of one server: until its process was stopped, and from then until it was up again."""

    drain: float
    start: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a rolling restart. ``moves`` have the outcome and the gap in milliseconds of each continuation.

    ``cut``: streams without their end. ``different``: complete streams that differ from the undisturbed ones. ``unexplained``: tokens that
    a server has counted and the ledger does not explain.
    """

    streams: int
    restarts: Sequence[Restart]
    moves: Sequence[tuple[str, float]]
    cut: int
    different: int
    unexplained: Mapping[str, int]

    def __str__(self) -> str:
        gaps = sorted(gap for _, gap in self.moves) or [0.0]
        return "\n".join(
            [
                *(f"a server: drained within {each.drain:.1f} s, started within {each.start:.1f} s" for each in self.restarts),
                f"{self.streams} streams: {len(self.moves)} moves, {self.cut} cut, {self.different} different",
                f"gap: {gaps[len(gaps) // 2]:.0f} ms, of 99 in 100 at most {gaps[len(gaps) * 99 // 100]:.0f} ms",
                f"tokens that the ledger does not explain: {dict(self.unexplained)}",
            ]
        )


@dataclass(slots=True)
class _Watched:
    """A server while it restarts: its process, and when it left the rotation and was stopped."""

    pid: int
    left: float | None = None
    stopped: float | None = None
    result: list[Restart] = field(default_factory=list)

    def observe(self, shown: Mapping[str, Any], now: float) -> None:
        is_up = shown["condition"] == "up"
        if self.left is None and not is_up:
            self.left = now
        if self.left is not None and self.stopped is None and shown["pid"] != self.pid:
            self.stopped = now
        if self.left is not None and self.stopped is not None and is_up and not self.result:
            self.result.append(Restart(self.stopped - self.left, now - self.stopped))


async def rolling_restart(folder: Path, streams: int, *, tokens: int, speed: float) -> Figures:
    """Restart the servers under so many streams of so many tokens, each of so many a second."""
    flags = FLAGS | {"sim-tokens": tokens, "sim-tokens-per-second": speed}
    model = launched(MODEL, **flags)
    model["launch"]["replicas"] = REPLICAS
    ledger = {"ledger": {"url": f"sqlite:///{folder}/usage.db", "sample_interval": "500ms"}}
    since = time.time()
    with gateway(folder, whole({**model, "resume": "exact"}, drain="10m") | ledger, seconds=WITHIN) as one:
        bodies = [question(number) for number in range(streams)]
        await _until(lambda: all(each["scale_out"] for each in _servers(one)))
        tasks = [asyncio.create_task(request_once(one.data, request(body))) for body in bodies]
        await _until(lambda: sum(each["in_flight"] for each in _servers(one)) == streams)
        restarts = await _restart(one)
        replies = await asyncio.gather(*tasks)
        await _until(lambda: one.log.count('"endpoint":"/v1/chat/completions"') >= streams)
        continuations = [each for line in one.log.splitlines() for each in json.loads(line).get("continuations", ())]
        await _until(lambda: all(each["in_flight"] == 0 for each in _servers(one)))
        await asyncio.sleep(2)  # the last samples
        unexplained = _unexplained(one, since)
    expected = undisturbed(bodies, flags)
    complete = [is_complete(reply) for reply in replies]
    different = sum(whole and text_of(reply.body) != text for whole, reply, text in zip(complete, replies, expected, strict=True))
    moves = [(each["outcome"], each.get("gap_ms", 0.0)) for each in continuations]
    return Figures(streams, restarts, moves, complete.count(False), different, unexplained)


async def _restart(one: Gateway) -> list[Restart]:
    watched = {each["name"]: _Watched(each["pid"]) for each in _servers(one)}
    command = asyncio.create_task(asyncio.to_thread(one.command, "restart", MODEL))

    def ended() -> bool:
        for each in _servers(one):
            watched[each["name"]].observe(each, time.monotonic())
        return all(each.result for each in watched.values())

    await _until(ended)
    assert (await command).returncode == 0, command.result().stderr
    return [each.result[0] for each in watched.values()]


def _servers(one: Gateway) -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = one.get("/status").json()["models"][0]["servers"]
    return servers


def _unexplained(one: Gateway, since: float) -> dict[str, int]:
    times = [datetime.fromtimestamp(each, UTC).isoformat().replace("+00:00", "Z") for each in (since, time.time())]
    found = one.get(f"/usage?reconcile=true&since={times[0]}&until={times[1]}").json()["servers"]
    names = ("direct_use", "difference", "not_delivered", "uncounted")
    return {
        f"{each['server']} {kind} {name}": each[kind][name]
        for each in found
        for kind in ("prompt", "completion")
        for name in names
        if each[kind].get(name)
    }


async def _until(condition: Callable[[], bool]) -> None:
    """Poll a condition in a thread, so that the streams are read meanwhile."""
    await asyncio.to_thread(wait_for, condition, WITHIN)


def question(number: int) -> dict[str, Any]:
    return {"model": MODEL, "stream": True, "temperature": 0, "messages": [{"role": "user", "content": f"Question {number}"}]}


def undisturbed(bodies: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]) -> list[str]:
    """Return the texts of the same streams from one server."""
    arguments = [f"--{name}={value}" for name, value in {**flags, "sim-tokens-per-second": 0}.items()]
    with running("--served-model-name", MODEL, *arguments) as server:
        return [text_of(server.post("/v1/chat/completions", body).content) for body in bodies]


def is_complete(reply: Reply) -> bool:
    return reply.status == 200 and reply.whole and reply.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in reply.body


def text_of(body: bytes) -> str:
    """Return the text of a stream, with its finish reason."""
    documents = [json.loads(data) for data in map(data_of, split(body)) if data.startswith(b"{")]
    choices = [choice for document in documents for choice in document["choices"]]
    texts = (choice["delta"].get(name) or "" for choice in choices for name in ("reasoning", "content"))
    return "".join(texts) + str([choice["finish_reason"] for choice in choices if choice["finish_reason"]])


async def measure(streams: int) -> int:
    """Print the figures of a run with so many streams. Returns the number of those whose client noticed the restart."""
    with tempfile.TemporaryDirectory() as folder:
        figures = await rolling_restart(Path(folder), streams, tokens=300, speed=2)
    print(figures)
    return figures.cut + figures.different
