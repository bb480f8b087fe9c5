"""Measures one round of one proxy in the case `pauses`: loads it, has its probe measure, and reads the result.

The rule: a process measures itself, so the numbers of two proxies differ by what their event loops do and not by how they are observed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from tests.benchmarks.accounting import cost
from tests.benchmarks.pauses.bare import Settings
from tests.benchmarks.pauses.probe import FILE, Durations, Longest, Result
from tests.benchmarks.pauses.traffic import Traffic
from tests.benchmarks.peers import Command, Proxy, Running, Setting, token
from tests.benchmarks.stage import Stage, say
from tests.benchmarks.standin import ROOT

VARIANT = "mixed load"
_SITE = Path(__file__).with_name("site")
_RESULT = "probe.json"
_WRITTEN = 60.0  # seconds in which a process writes its result
_POLL = 0.05
_NOTED = 3  # callbacks that the report names


def probed(proxy: Proxy) -> Proxy:
    """Return the same proxy, whose process has a probe if it is the gateway's worker, or runs one itself."""

    def command(setting: Setting, folder: Path, port: int) -> Command:
        made = proxy.command(setting, folder, port)
        environ = {"PYTHONPATH": os.pathsep.join(map(str, (_SITE, ROOT))), FILE: str(folder / _RESULT)}
        return replace(made, environ={**made.environ, **environ})

    return replace(proxy, command=command)


def _bare(setting: Setting, folder: Path, port: int) -> Command:
    hashes = frozenset(hashlib.sha256(token(number).encode()).hexdigest() for number in setting.key_numbers)
    settings = Settings(port, hashes, dict(zip(setting.models, setting.upstreams, strict=True)))
    (folder / "bare.json").write_bytes(msgspec.json.encode(settings))
    return Command([sys.executable, "-m", "tests.benchmarks.pauses.bare", "bare.json"])


BARE = probed(Proxy("bare protocol", "", lambda: "", lambda: None, _bare))


async def measure(stage: Stage, proxy: Running, seconds: float) -> None:
    """Load a proxy for so long: `callback_p50`, … of the CPU time of a callback; `p50`, … of a pause; `busy`, the share of a core that it
    took; `requests`, how many had a response.
    """
    file = proxy.folder / _RESULT
    file.unlink(missing_ok=True)
    [process] = proxy.tree.workers() or proxy.tree.processes()
    traffic = Traffic(proxy.port, stage.scale, _metrics(proxy))
    try:
        async with traffic.streams():
            process.send_signal(signal.SIGUSR1)
            with cost(proxy.tree) as spent:
                await traffic.load(seconds)
            process.send_signal(signal.SIGUSR2)
            result = await _written(file)
    except TimeoutError:
        stage.add(proxy.name, VARIANT, {}, ("the streams did not open, or the probe has not reported, in time", *_texts(traffic.faults)))
        return
    values = {f"callback_{name}": value for name, value in _values(result.callbacks).items()} | _values(result.pauses)
    stage.add(proxy.name, VARIANT, values | {"busy": spent.proxy / seconds, "requests": traffic.done}, _texts(traffic.faults))
    stage.note(proxy.name, VARIANT, f"longest callbacks: {', '.join(map(_text, result.longest[:_NOTED]))}")
    for each in result.longest:
        say(f"    {_text(each)}, {each.count} of 0.1 ms or more")


def _values(durations: Durations) -> dict[str, float]:
    return {"p50": durations.p50, "p99": durations.p99, "p999": durations.p999, "most": durations.most}


def _text(longest: Longest) -> str:
    return f"`{longest.name}` {longest.most * 1e3:.1f} ms"


def _texts(faults: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(f"{count} × {fault}" for fault, count in faults.items())


async def _written(file: Path) -> Result:
    """Return the result that another process writes. Raises TimeoutError."""
    async with asyncio.timeout(_WRITTEN):
        while (result := _read(file)) is None:  # noqa: ASYNC110  the condition is in another process
            await asyncio.sleep(_POLL)
    return result


def _read(file: Path) -> Result | None:
    return msgspec.json.decode(file.read_bytes(), type=Result) if file.exists() else None


def _metrics(proxy: Running) -> str | None:
    """The address of a proxy's metrics: the other port on which its first process listens."""
    found = proxy.tree.processes()[0].net_connections("tcp4")
    ports = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN} - {proxy.port}
    return f"http://127.0.0.1:{min(ports)}/metrics" if ports else None
