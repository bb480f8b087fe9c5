"""Run the gateway with the control process in the test's own event loop, so that a test can call the operator's functions directly."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from rich.console import Console

from gateway.config import load
from gateway.control.admin_operations import AdminOperations
from gateway.control.assembly import Environment, assembled
from gateway.control.control import Control
from gateway.control.reload import Reloader
from gateway.control.report import GatewayReport
from gateway.control.serve import listen
from gateway.control.startup_messages import Announcer
from gateway.fleet.operations import ReloadResult
from gateway.telemetry.metrics import Series
from tests.support.process import configuration, launched, write
from tests.support.running import KEY, until
from upstream.discovery.dns import Resolve, system_resolver
from upstream.discovery.kubernetes import Cluster

NO_CLUSTER = Cluster("", "")


def on_demand(identity: str, *, queue: dict[str, Any] | None = None, args: dict[str, Any] | None = None, **launch: Any) -> dict[str, Any]:
    """Return a model whose simulator starts on demand. ``launch``: more settings of the launch.

    The queue's wait is long enough for a start on a busy machine.
    """
    model = launched(identity, **{"sim-tokens": 4, "sim-tokens-per-second": 0, **(args or {})})
    model["launch"] |= {"start": "on_demand", **launch}
    return model | {"queue": queue or {"wait": "2m"}}


@dataclass
class Controlled:
    """A running gateway. ``output`` is its terminal output."""

    control: Control
    reloader: Reloader
    port: int
    output: io.StringIO
    client: httpx2.AsyncClient
    file: Path
    _still: set[int] = field(default_factory=set)

    @property
    def operations(self) -> AdminOperations:
        """The operations of the admin port."""
        return AdminOperations(self.control, self.reloader, asyncio.Queue())

    @property
    def report(self) -> GatewayReport:
        """The report that the admin port would show."""
        return GatewayReport(self.control)

    async def reload(self, *models: dict[str, Any], groups: Sequence[dict[str, Any]] = (), **server: Any) -> ReloadResult:
        """Write another configuration and reload it."""
        write(self.file, configuration(*models, **server) | {"groups": list(groups)})
        return await self.reloader.reload()

    def status(self, model: str) -> dict[str, Any]:
        """Return the model's entry in /status."""
        return next(each for each in self.report.status()["models"] if each["id"] == model)

    def state(self, model: str) -> str:
        return str(self.status(model)["state"])

    async def reaches(self, model: str, state: str, seconds: float = 60.0) -> None:
        """Wait until a model is in a state and the workers have applied it. Raises TimeoutError."""
        try:
            await until(lambda: self.state(model) == state, seconds)
        except TimeoutError:
            raise TimeoutError(f"{model} is {self.state(model)} and not {state}\n{self.output.getvalue()}") from None
        await self.wait_for_workers()

    async def wait_for_workers(self) -> None:
        """Wait until the workers have applied the current health of all servers. Raises TimeoutError."""
        number = self.control.publisher.publish_health()
        await until(lambda: self.control.workers.have_applied(number), 30.0)

    def value(self, family: str, *labels: str) -> float:
        """Return the first cell of a series, or 0 if the series does not exist."""
        return self.report.series().get(Series(family, labels), (0.0,))[0]

    def launches(self, model: str) -> float:
        return self.value("launches_total", model, "ready")

    async def request(self, model: str, **body: Any) -> httpx2.Response:
        """Send a request with the key."""
        document = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **body}
        return await self.client.post("/v1/chat/completions", json=document)

    async def streams(self, model: str, count: int = 1, seconds: float = 2.0) -> list[asyncio.Task[httpx2.Response]]:
        """Start ``count`` streams of about ``seconds`` each, and wait until all of them are in flight. Call it once for each model.

        A request that has just finished may count as in flight a moment longer, so the number from before is not used.
        """
        simulate = {"tokens": 20, "tokens_per_second": 20 / seconds}
        with (
            self.frozen(model) if self.state(model) == "ready" else nullcontext()
        ):  # otherwise the first could finish before the last starts
            tasks = [asyncio.create_task(self.request(model, stream=True, simulate=simulate)) for _ in range(count)]
            await until(lambda: self.in_flight(model) == count)
        return tasks

    @contextmanager
    def frozen(self, model: str) -> Iterator[None]:
        """Freeze a model's servers for the duration of the block, so that none of their requests finishes in it."""
        stopped = [pid for pid in self.pids(model) if pid not in self._still]
        self._still.update(stopped)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self._still.difference_update(stopped)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def in_flight(self, model: str) -> int:
        return sum(int(each["in_flight"]) for each in self.status(model)["servers"])

    def pids(self, model: str) -> list[int]:
        return [each["pid"] for each in self.status(model)["servers"] if each.get("pid")]


@asynccontextmanager
async def controlled(
    folder: Path,
    *models: dict[str, Any],
    groups: Sequence[dict[str, Any]] = (),
    keys: Sequence[dict[str, Any]] = (),
    cluster: Cluster = NO_CLUSTER,
    resolve: Resolve = system_resolver,
    **server: Any,
) -> AsyncIterator[Controlled]:
    """Run a configuration; no process is left at the end. ``keys``: further ones. ``cluster`` and ``resolve``: to discover servers."""
    file = folder / "gateway.yaml"
    document = configuration(*models, **server) | {"groups": list(groups)}
    document["keys"] += keys
    file.write_text(yaml.safe_dump(document))
    config, output = load(file), io.StringIO()
    async with AsyncExitStack() as stack:
        data = stack.enter_context(closing(listen("127.0.0.1", 0, "server.port")))
        environment = Environment(folder / "logs", os.environ, cluster, "/tmp", resolve)
        announcer = Announcer(Console(file=output, width=200))
        control, reloader = await stack.enter_async_context(assembled(config, file, data, environment, announcer))
        announcer.interval = 3600.0  # each message is from an event
        control.start()
        stack.push_async_callback(_ended, control, asyncio.create_task(control.fleet.run()), asyncio.create_task(control.report_progress()))
        port = data.getsockname()[1]
        client = await stack.enter_async_context(_client(port))
        await until(lambda: control.readiness.not_ready() is None, 60.0)
        yield Controlled(control, reloader, port, output, client, file)


def _client(port: int) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        headers={"authorization": f"Bearer {KEY}"},
        timeout=110,
        limits=httpx2.Limits(max_connections=None),
        verify=False,
        trust_env=False,
    )


async def _ended(control: Control, *tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await control.stop()


async def held(condition: Callable[[], bool], seconds: float, *streams: asyncio.Task[httpx2.Response]) -> None:
    """Check that a condition holds for ``seconds``, or until ``streams`` have finished, which a busy machine may notice late."""
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        if not condition():
            assert streams and not (await asyncio.wait(streams, timeout=30.0))[1]
            return
        await asyncio.sleep(0.02)
