"""`make bench`: run the cases that were named, all by default, keep what they brought, and write the report.

The environment may say BENCH_ROUNDS (turns of each proxy), BENCH_SECONDS (a factor on how long each turn is), BENCH_GROWTH and
BENCH_PAUSES (seconds of load for each proxy in the cases `rest` and `pauses`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path

import uvloop

from tests.benchmarks import quick, report, results
from tests.benchmarks.accounting import LOAD_CORE, TooFewCores, pinned_to
from tests.benchmarks.cases import CASES
from tests.benchmarks.peers import PROXIES, debian
from tests.benchmarks.stage import Scale, measured, say

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORED = Path("performance/results.json")


def main() -> int:
    """Returns the exit code: 2 when this machine cannot run it."""
    arguments = _arguments()
    if arguments.report:
        report.write(arguments.to, results.read(arguments.to / STORED))
        return 0
    if not arguments.quick and (missing := [reason for name in ("wrk", "nginx") if (reason := debian(name))]):
        say("\n".join(missing))
        return 2
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()  # what the clients of many streams allocate is all that the collector need look at
    try:
        with pinned_to(LOAD_CORE):
            uvloop.run(_stoppable(_work(arguments)))
    except TooFewCores as error:
        say(str(error))
        return 2
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return 0


def _work(arguments: argparse.Namespace) -> Coroutine[None, None, None]:
    if arguments.quick:
        return quick.run([proxy for proxy in PROXIES if proxy.name in arguments.proxies], _scale(rounds=2))
    return run(arguments.cases or list(CASES), arguments.proxies, _scale(), arguments.to)


async def _stoppable(work: Coroutine[None, None, None]) -> None:
    """SIGTERM ends it as Ctrl-C does: every process that was started is ended first."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await work


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure the gateway beside its peers.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--proxies", nargs="*", choices=[proxy.name for proxy in PROXIES], default=[proxy.name for proxy in PROXIES])
    parser.add_argument("--quick", action="store_true", help="print a comparison that takes two minutes, and write no file")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report from the results that are there")
    parser.add_argument("--to", type=Path, default=DOCS, help="the folder of the pages and of performance/; default: docs")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}")
    return arguments


def _scale(rounds: int = 3) -> Scale:
    environ = os.environ
    return Scale(
        int(environ.get("BENCH_ROUNDS", rounds)),
        float(environ.get("BENCH_SECONDS", 1)),
        growth=float(environ.get("BENCH_GROWTH", 60)),
        pauses=float(environ.get("BENCH_PAUSES", 120)),
    )


async def run(cases: list[str], proxies: list[str], scale: Scale, to: Path) -> None:
    """Run the cases one after the other; what each brought is kept, and in the report, at once."""
    for name in cases:
        say(f"== {name}")
        section = await measured(name, CASES[name], [proxy for proxy in PROXIES if proxy.name in proxies], scale)
        stored = results.read(to / STORED) | {name: section}
        results.write(to / STORED, stored)
        report.write(to, stored)


if __name__ == "__main__":
    sys.exit(main())
