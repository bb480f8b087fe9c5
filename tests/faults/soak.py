"""``make soak``: the whole gateway, with servers that fail in many ways at once, for ten minutes; and what it holds at the end.

The rule: a look is taken at the processes as they are, from outside; the workload is drawn from a seed.
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

from tests.faults.invariants import request_ids, soon_idle, whole
from tests.faults.report import ROOT, machine
from tests.support.process import Gateway, configuration, gateway, launched
from tests.support.wire import DONE, Reply, chat, client, request
from tests.upstream.simulator.test_process import Simulated, running

PAGE = ROOT / "docs" / "reliability-soak.md"
CLIENTS = 24
LONG = 600.0
"""Seconds from which on a soak is long enough to have filled every cache and pool in its first half."""
GROWTH, SHORT_GROWTH = 5.0, 30.0
"""MiB by which a process may grow over the second half, as the line through its looks says: of a long soak (1 MiB in a minute, which is
about 150 bytes for each request that a worker has had), and of a shorter one, which still fills caches and pools."""
TIMEOUTS = {"connect": "1s", "first_byte": "2s", "idle": "1s", "total": "20s"}
FAULTS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {},
    {"status": 503}, {"status": 500}, {"error_first": True}, {"error_after": 5}, {"abort_after": 5}, {"hang_after": 3},
    {"hang_before_headers": True}, {"cut_before_headers": True}, {"cut_after": 2}, {"cut_bytes": 90}, {"chunk_bytes": 7},
)  # fmt: skip
"""What a server may do with a request; most often nothing out of the way."""
KINDS = ("plain", "stream", "leave early", "leave in the stream", "no key", "bad body", "no such model")
_READ = 65536


@dataclass
class Look:
    """What a process holds at a moment: seconds since the beginning, bytes, descriptors."""

    at: float
    rss: int
    fds: int


@dataclass
class Findings:
    """What a soak saw. ``looks`` are by process, the last ones when all clients had gone; ``left``: what there was then that there was not
    at first, in words."""

    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    looks: dict[str, list[Look]] = field(default_factory=dict)
    left: str = ""
    sent: int = 0
    recorded: int = 0

    def slope(self, name: str) -> float:
        """By how much a process grew, in MiB per minute, over the second half: the first fills caches and pools."""
        points = [(look.at, look.rss) for look in self.looks[name] if self.seconds / 2 <= look.at <= self.seconds]
        return slope(points) * 60 / 2**20

    @property
    def more_descriptors(self) -> list[str]:
        """Which processes have more of them than at first, in words."""
        return [
            f"{name} has {looks[-1].fds} descriptors, and had {looks[0].fds} at first"
            for name, looks in self.looks.items()
            if looks[-1].fds > looks[0].fds
        ]

    @property
    def unmet(self) -> list[str]:
        """The bars that were missed, in words."""
        most = (GROWTH if self.seconds >= LONG else SHORT_GROWTH) / (self.seconds / 120)
        said = [f"{name} grew by {self.slope(name):.1f} MiB/min, and {most:.1f} may be" for name in self.looks if self.slope(name) >= most]
        said += self.more_descriptors
        unheard = self.outcomes["left"]  # a request may have been on its way when its client reset the connection
        if not self.sent - unheard <= self.recorded <= self.sent:
            said.append(f"{self.recorded:,} requests are recorded, of {self.sent:,} that were sent and {unheard:,} whose clients left")
        return said + [self.left] * bool(self.left)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through the points that is nearest to them (least squares); 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0


class Soak:
    """A running soak: clients, and somebody who freezes and kills servers."""

    def __init__(self, one: Gateway, servers: Sequence[Simulated], seconds: float, seed: int) -> None:
        self._one = one
        self._servers = servers
        self._dice = random.Random(seed)
        self._began = time.monotonic()
        self.findings = Findings(seconds)

    @property
    def _over(self) -> bool:
        return time.monotonic() - self._began > self.findings.seconds

    async def run(self) -> Findings:
        """Everything, until the time is over and the last client has gone."""
        watching = asyncio.create_task(self._watch())
        await asyncio.gather(self._freeze(), *(self._client() for _ in range(CLIENTS)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return self.findings

    async def _client(self) -> None:
        while not self._over:
            kind = self._dice.choice(KINDS)
            self.findings.sent += 1
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                self.findings.outcomes[await asyncio.wait_for(self._ask(kind), 60)] += 1
            await asyncio.sleep(self._dice.uniform(0, 0.02))

    async def _ask(self, kind: str) -> str:
        asked = chat(stream="stream" in kind, simulate={"tokens": 20, "tokens_per_second": 200, **self._dice.choice(FAULTS)})
        asked["model"] = "nobody" if kind == "no such model" else self._dice.choice(["sim/found", "sim/launched", "sim/down"])
        wire = request(b"{" if kind == "bad body" else asked, token=None if kind == "no key" else "sk-a-test-key")
        async with client(self._one.data) as one:
            one.send(wire)
            if kind.startswith("leave"):
                with suppress(TimeoutError):
                    await asyncio.wait_for(one.reader.read(_READ if "stream" in kind else 1), self._dice.uniform(0, 0.1))
                return "left"
            return outcome(await one.reply())

    async def _freeze(self) -> None:
        """Now and then a server stands still for a while, or a launched one is killed."""
        while not self._over:
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
            if (pid := shown["servers"][0].get("pid")) is not None:  # without one psutil would take this very process
                psutil.Process(pid).kill()

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(max(self.findings.seconds / 100, 0.2))

    def look(self) -> None:
        """Note what each process holds now."""
        at = time.monotonic() - self._began
        watched = {"control": self._one.process.pid, **{f"worker {number}": pid for number, pid in self._one.workers().items()}}
        for name, pid in watched.items():
            process = psutil.Process(pid)
            self.findings.looks.setdefault(name, []).append(Look(at, process.memory_info().rss, process.num_fds()))

    def look_at_rest(self, within: float = 15.0) -> None:
        """The last look, between two probes of the servers: each is a descriptor of control's for as long as it takes."""
        deadline = time.monotonic() + within
        self.look()
        while self.findings.more_descriptors and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()


def outcome(reply: Reply) -> str:
    """How an answer ended, in a word or two. Raises AssertionError for one that no client could understand."""
    stream = reply.headers.get("content-type", "").startswith("text/event-stream")
    if not stream or reply.status != 200:
        assert reply.whole or reply.status == 200, reply
        return f"{reply.status}" if reply.whole else "cut"
    assert reply.whole and reply.body.endswith(DONE), reply
    return "stream with an error" if b'{"error":' in reply.body else "stream"


def soak(seconds: float, folder: Path, seed: int = 33) -> Findings:
    """Run for so long. Raises AssertionError for an answer that no client could understand."""
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
        running_one.look_at_rest()
        findings.recorded = len(request_ids(one.log))
    return findings


def rendered(findings: Findings) -> str:
    """The page."""
    outcomes = ", ".join(f"{name} {count:,}" for name, count in findings.outcomes.most_common())
    lines = [
        "# Soak test",
        "",
        "This page lets you check the gateway's memory and descriptors over a long run with mixed faults.",
        "",
        f"`make soak` ran {CLIENTS} clients for {findings.seconds:g} seconds against a gateway with two workers. The servers",
        "respond, reject, stall, truncate, abort, freeze and are killed. The clients disconnect at any time and send invalid",
        "requests. Every response was valid.",
        "",
        machine(),
        "",
        f"- {findings.sent:,} requests sent, {findings.recorded:,} recorded.",
        f"- Outcomes: {outcomes}.",
        *[f"- **Missed:** {said}." for said in findings.unmet],
        "",
        "| process | initial memory | final memory | slope over the second half | initial descriptors | maximum | final |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, looks in findings.looks.items():
        first, last = looks[0], looks[-1]
        memory = f"{first.rss / 2**20:.1f} MiB | {last.rss / 2**20:.1f} MiB | {findings.slope(name):+.2f} MiB/min"
        lines.append(f"| {name} | {memory} | {first.fds} | {max(look.fds for look in looks)} | {last.fds} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write the page; returns 1 when a bar was missed, which the page tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LONG)
    parser.add_argument("--to", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        findings = soak(options.seconds, Path(folder))
    options.to.write_text(rendered(findings))
    for said in findings.unmet:
        print(said, file=sys.stderr)
    return int(bool(findings.unmet))


if __name__ == "__main__":
    sys.exit(main())
