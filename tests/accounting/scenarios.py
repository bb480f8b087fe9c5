"""The accounting runs: real vLLMs, or simulators, with disconnecting clients, killed engines, a killed worker and a database outage."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil

from tests.accounting.client import USER_HEADER
from tests.accounting.engines import LaunchedEngine
from tests.accounting.evidence import Tokens
from tests.accounting.months import close_month
from tests.accounting.run import SETTLES_WITHIN, AccountingRun, Phase
from tests.accounting.summary import EngineResult, Summary
from tests.accounting.workload import CHAT, COMPLETIONS, RESPONSES, Disconnect, PlannedRequest
from tests.support.postgres import Postgres, postgres
from tests.support.process import configuration, gateway, launched, wait_for
from tests.vllm.gateway import real_model
from tests.vllm.server import START_WITHIN

SAMPLE_INTERVAL = "500ms"
DISCONNECTING = 0.55
"""The probability of a disconnect in most phases. Some of these clients have the whole response before."""
_DIRECT_REQUESTS = 10
_DIRECT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}
_SHORTER = 4  # responses of simulators, so that a run of 100,000 requests takes minutes
_SPEED = 200.0  # tokens per second of a simulator's choice
CLIENTS = 12


@contextmanager
def real_run(folder: Path, seed: int) -> Iterator[tuple[AccountingRun, Postgres]]:
    """Run a gateway with two real vLLMs, each behind a recording proxy, and PostgreSQL."""
    with ExitStack() as stack:
        recordings = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tee-"))) for _ in range(2)]
        models = [real_model(name, each) for name, each in zip(("tests/killed", "tests/spared"), recordings, strict=True)]
        for model in models:
            del model["aliases"]
        yield stack.enter_context(_run(folder, models, recordings, Random(seed)))


@contextmanager
def simulated_run(folder: Path, seed: int) -> Iterator[tuple[AccountingRun, Postgres]]:
    """Run a gateway with two launched simulators and PostgreSQL."""
    flags = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes", "reasoning-parser": "qwen3", "sim-tokens-per-second": _SPEED}
    models = [launched(name, **flags) for name in ("sim/killed", "sim/spared")]
    with _run(folder, models, (None, None), Random(seed)) as (run, database):
        run.adapt, run.merged, run.clients = _simulated, False, 2 * CLIENTS
        yield run, database


def _simulated(_: Random, planned: PlannedRequest) -> PlannedRequest:
    """Shorten a request, and let the client see the tokens of each event of chat and completions: a simulator's bytes are not recorded."""
    name = "max_output_tokens" if planned.path == RESPONSES else "max_tokens"
    body, disconnect = {**planned.body, name: max(planned.body[name] // _SHORTER, 1)}, planned.disconnect
    if planned.path == CHAT and planned.streamed:
        body["logprobs"] = True
    elif planned.path == COMPLETIONS and planned.streamed:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if disconnect is not None and disconnect.events is not None:
        disconnect = Disconnect(max(disconnect.events // _SHORTER, 1))
    return replace(planned, body=body, disconnect=disconnect)


@contextmanager
def _run(
    folder: Path, models: Sequence[dict[str, Any]], recordings: Sequence[Path | None], rng: Random
) -> Iterator[tuple[AccountingRun, Postgres]]:
    models[0]["fallbacks"] = [models[1]["id"]]
    with postgres() as database:
        url = database.database()
        config = configuration(*models, workers=2) | {"ledger": {"url": url, "sample_interval": SAMPLE_INTERVAL}}
        config["keys"][0]["user_header"] = USER_HEADER
        with gateway(folder, config, seconds=2 * START_WITHIN) as one:
            engines = [LaunchedEngine(one, model["id"], each) for model, each in zip(models, recordings, strict=True)]
            run = AccountingRun(one, engines, url, CLIENTS, rng)
            run.wait_until_up()
            yield run, database


def play(run: AccountingRun, database: Postgres, requests: int, victims: Sequence[str]) -> Summary:
    """Play all phases. ``victims``: the title of the process that dies in each kill of an engine, empty for its main process."""
    killed, spared = run.engines
    first, second, third = (partial(killed.killer, title) for title in victims)
    phases = (
        Phase("kill 1", 0.2, DISCONNECTING, first),
        Phase("outage", 0.15, DISCONNECTING, lambda: database.stop, database.start),
        Phase("kill 2", 0.2, DISCONNECTING, second, waits=True),
        Phase("worker", 0.2, DISCONNECTING, partial(worker_killer, run), waits=True),
        Phase("kill 3", 0.15, DISCONNECTING, third),
        Phase("end", 0.1, DISCONNECTING, waits=True),
    )
    run.play_references()
    for _ in range(_DIRECT_REQUESTS):
        spared.post_directly(CHAT, _DIRECT)
    rest = requests - len(run.verdicts)
    for phase in phases:
        run.play(phase, round(phase.share * rest))
    run.wait_until_up()
    faults = f"three kills of an engine, a kill of a worker, an outage of the database, {_DIRECT_REQUESTS} direct requests to an engine"
    return Summary(run.verdicts, list(engine_results(run)), run.ages, faults, close_month(run))


def worker_killer(run: AccountingRun) -> Callable[[], None]:
    """Return a function that kills the worker of the gateway that has the most connections of clients."""
    gateway = run.gateway

    def connections(pid: int) -> int:
        found = psutil.Process(pid).net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == gateway.data for each in found)

    return lambda: os.kill(max(gateway.workers().values(), key=connections), signal.SIGKILL)


def engine_results(run: AccountingRun) -> Iterator[EngineResult]:
    """Reconcile each run of each engine separately. A run that was killed before its first sample is omitted."""
    for engine in run.engines:
        counters = engine.counters()
        wait_for(lambda: _is_sampled(run, engine, counters), SETTLES_WITHIN, why=lambda: f"{engine.name}: {counters}")  # noqa: B023
        starts = run.starts(engine)
        times = [0.0, *(start - 0.001 for start in starts[1:]), time.time()]
        for number in range(len(starts)):
            found = run.reconciled(*times[number : number + 2]).get(engine.name)
            if found is not None:
                killed = number < len(starts) - 1
                unsampled = Tokens(found["prompt_unsampled"], found["completion_unsampled"])
                yield EngineResult(engine.name, killed, None if killed else counters, found["prompt"], found["completion"], unsampled)


def _is_sampled(run: AccountingRun, engine: LaunchedEngine, counters: Tokens) -> bool:
    """Return whether the samples have the counters of the engine's last run."""
    starts = run.starts(engine)
    if not starts or round(1000 * starts[-1]) != round(1000 * engine.started()):
        return False
    found = run.reconciled(starts[-1] - 0.001 if len(starts) > 1 else 0.0).get(engine.name)
    return found is not None and Tokens(found["prompt"]["engine"], found["completion"]["engine"]) == counters
