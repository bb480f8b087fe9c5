"""``make soak``: run the whole gateway for ten minutes with servers that fail in many ways at once, and report its memory.

The rule: the processes are measured from outside, and the workload is drawn from a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.accounting.summary import BEGIN, END
from tests.faults.invariants import request_ids, soon_idle, whole
from tests.faults.report import ROOT, machine
from tests.support.process import Gateway, configuration, gateway, launched
from tests.support.wire import DONE, Reply, chat, client, request
from tests.upstream.simulator.test_process import Simulated, running

PAGE = ROOT / "docs" / "reliability-soak.md"
CLIENTS = 24
LONG = 600.0
"""Seconds after which a soak is long enough: every cache and pool is full after its first half."""
GROWTH, SHORT_GROWTH = 5.0, 30.0
"""MiB by which a process may grow over the second half, by a linear fit. A long soak may grow by 1 MiB per minute, which is about
150 bytes per request of a worker. A shorter soak may grow more, since it still fills caches and pools."""
TIMEOUTS = {"connect": "1s", "first_byte": "2s", "idle": "1s", "total": "20s"}
FAULTS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {},
    {"status": 503}, {"status": 500}, {"error_first": True}, {"error_after": 5}, {"abort_after": 5}, {"hang_after": 3},
    {"hang_before_headers": True}, {"cut_before_headers": True}, {"cut_after": 2}, {"cut_bytes": 90}, {"chunk_bytes": 7},
)  # fmt: skip
"""Faults of a server. Most requests have none."""
KINDS = ("plain", "stream", "leave early", "leave in the stream", "no key", "bad body", "no such model")
_READ = 65536
_ACCOUNTING = f"""
## Accounting

Then 100,000 requests are played with two launched simulators and PostgreSQL, and each row of the ledger is compared with what its client
received, as [with real vLLMs](accounting.md#measured-accuracy).

{BEGIN}

{END}
"""
"""The section that ``tests.accounting`` fills."""


@dataclass
class Sample:
    """One measurement of a process: seconds since the start of the soak, resident bytes, file descriptors."""

    at: float
    rss: int
    fds: int


@dataclass
class Findings:
    """The results of a soak. ``looks`` has the measurements of each process; the last one was taken after all clients had disconnected.
    ``left`` describes what remained then and was not there at first."""

    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    left: str = ""
    sent: int = 0
    recorded: int = 0

    def slope(self, name: str) -> float:
        """Return the growth of a process over the second half, in MiB per minute. The first half fills caches and pools."""
        points = [(sample.at, sample.rss) for sample in self.samples[name] if self.seconds / 2 <= sample.at <= self.seconds]
        return slope(points) * 60 / 2**20

    @property
    def more_descriptors(self) -> list[str]:
        """List the processes that have more descriptors than at first, as text."""
        return [
            f"{name} has {samples[-1].fds} descriptors, and had {samples[0].fds} at first"
            for name, samples in self.samples.items()
            if samples[-1].fds > samples[0].fds
        ]

    @property
    def unmet(self) -> list[str]:
        """List the missed requirements, as text."""
        most = (GROWTH if self.seconds >= LONG else SHORT_GROWTH) / (self.seconds / 120)
        missed = [
            f"{name} grew by {self.slope(name):.1f} MiB/min, and {most:.1f} may be" for name in self.samples if self.slope(name) >= most
        ]
        missed += self.more_descriptors
        aborted = self.outcomes["left"]  # a request may not have arrived when its client reset the connection
        if not self.sent - aborted <= self.recorded <= self.sent:
            missed.append(f"{self.recorded:,} requests are recorded, of {self.sent:,} that were sent and {aborted:,} whose clients left")
        return missed + [self.left] * bool(self.left)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the linear fit through the points (least squares), or 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0


class Soak:
    """A running soak: clients, and a task that freezes and kills servers."""

    def __init__(self, one: Gateway, servers: Sequence[Simulated], seconds: float, seed: int) -> None:
        self._one = one
        self._servers = servers
        self._dice = random.Random(seed)
        self._began = time.monotonic()
        self.findings = Findings(seconds)

    @property
    def _finished(self) -> bool:
        return time.monotonic() - self._began > self.findings.seconds

    async def run(self) -> Findings:
        """Run all clients until the time has passed and the last client has disconnected."""
        watching = asyncio.create_task(self._watch())
        await asyncio.gather(self._freeze(), *(self._client() for _ in range(CLIENTS)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return self.findings

    async def _client(self) -> None:
        while not self._finished:
            kind = self._dice.choice(KINDS)
            self.findings.sent += 1
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                self.findings.outcomes[await asyncio.wait_for(self._send(kind), 60)] += 1
            await asyncio.sleep(self._dice.uniform(0, 0.02))

    async def _send(self, kind: str) -> str:
        body = chat(stream="stream" in kind, simulate={"tokens": 20, "tokens_per_second": 200, **self._dice.choice(FAULTS)})
        body["model"] = "nobody" if kind == "no such model" else self._dice.choice(["sim/found", "sim/launched", "sim/down"])
        wire = request(b"{" if kind == "bad body" else body, token=None if kind == "no key" else "sk-a-test-key")
        async with client(self._one.data) as one:
            one.send(wire)
            if kind.startswith("leave"):
                with suppress(TimeoutError):
                    await asyncio.wait_for(one.reader.read(_READ if "stream" in kind else 1), self._dice.uniform(0, 0.1))
                return "left"
            return outcome(await one.reply())

    async def _freeze(self) -> None:
        """Freeze a server for a while at random times, and sometimes kill a launched one."""
        while not self._finished:
            await asyncio.sleep(min(self._dice.uniform(1, 10), self.findings.seconds / 4))
            server = self._dice.choice(self._servers)
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._dice.uniform(0.1, 2))
            server.process.send_signal(signal.SIGCONT)
            if self._dice.random() < 0.2:
                self._kill_launched()

    def _kill_launched(self) -> None:
        (shown,) = (model for model in self._one.get("/status").json()["models"] if model["id"] == "sim/launched")
        with suppress(psutil.NoSuchProcess):
            if (pid := shown["servers"][0].get("pid")) is not None:  # without a pid psutil would use this process
                psutil.Process(pid).kill()

    async def _watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(max(self.findings.seconds / 100, 0.2))

    def sample(self) -> None:
        """Measure each process now."""
        at = time.monotonic() - self._began
        watched = {"control": self._one.process.pid, **{f"worker {number}": pid for number, pid in self._one.workers().items()}}
        for name, pid in watched.items():
            process = psutil.Process(pid)
            self.findings.samples.setdefault(name, []).append(Sample(at, process.memory_info().rss, process.num_fds()))

    def sample_at_rest(self, within: float = 15.0) -> None:
        """Take the last measurement between two probes of the servers. A probe holds a descriptor of control while it runs."""
        deadline = time.monotonic() + within
        self.sample()
        while self.findings.more_descriptors and time.monotonic() < deadline:
            time.sleep(0.05)
            self.sample()


def outcome(reply: Reply) -> str:
    """Classify how a response ended. Raises AssertionError if the response is invalid."""
    stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    if not stream or reply.status != 200:
        assert reply.whole or reply.status == 200, reply
        return f"{reply.status}" if reply.whole else "cut"
    assert reply.whole and reply.body.endswith(DONE), reply
    return "stream with an error" if b'{"error":' in reply.body else "stream"


def soak(seconds: float, folder: Path, seed: int = 33) -> Findings:
    """Run a soak for ``seconds``. Raises AssertionError if a response is invalid."""
    with ExitStack() as stack:
        flags = ("--served-model-name", "sim/found", "sim/launched")
        servers = [stack.enter_context(running(*flags)) for _ in range(2)]
        models = [
            {"id": "sim/found", "servers": [{"url": server.url} for server in servers], "timeouts": TIMEOUTS},
            {**soon_idle(launched("sim/launched")), "timeouts": TIMEOUTS, "fallbacks": ["sim/found"]},
            {"id": "sim/down", "servers": [{"url": "http://127.0.0.1:9"}], "timeouts": TIMEOUTS, "fallbacks": ["sim/found"]},
        ]
        one = stack.enter_context(gateway(folder, configuration(*models, workers=2)))
        held = stack.enter_context(ExitStack())
        held.enter_context(whole(one))
        running_one = Soak(one, servers, seconds, seed)
        findings = asyncio.run(running_one.run())
        try:
            held.close()
        except AssertionError as error:
            findings.left = str(error)
        running_one.sample_at_rest()
        findings.recorded = len(request_ids(one.log))
    return findings


def rendered(findings: Findings) -> str:
    """Render the page."""
    outcomes = ", ".join(f"{name} {count:,}" for name, count in findings.outcomes.most_common())
    lines = [
        "# Soak test",
        "",
        "This page lets you check the gateway's memory and descriptors over a long run with mixed faults, and its ledger.",
        "",
        f"`make soak` ran {CLIENTS} clients for {findings.seconds:g} seconds against a gateway with two workers. The servers",
        "respond, reject, stall, truncate, abort, freeze and are killed. The clients disconnect at any time and send invalid",
        "requests. Every response was valid.",
        "",
        machine(),
        "",
        f"- {findings.sent:,} requests sent, {findings.recorded:,} recorded.",
        f"- Outcomes: {outcomes}.",
        *[f"- **Missed:** {message}." for message in findings.unmet],
        "",
        "| process | initial memory | final memory | slope over the second half | initial descriptors | maximum | final |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, samples in findings.samples.items():
        first, last = samples[0], samples[-1]
        memory = f"{first.rss / 2**20:.1f} MiB | {last.rss / 2**20:.1f} MiB | {findings.slope(name):+.2f} MiB/min"
        lines.append(f"| {name} | {memory} | {first.fds} | {max(sample.fds for sample in samples)} | {last.fds} |")
    return "\n".join([*lines, _ACCOUNTING])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak and write the page. Return 1 if a requirement was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LONG)
    parser.add_argument("--to", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        findings = soak(options.seconds, Path(folder))
    options.to.write_text(rendered(findings))
    for message in findings.unmet:
        print(message, file=sys.stderr)
    return int(bool(findings.unmet))


if __name__ == "__main__":
    sys.exit(main())
