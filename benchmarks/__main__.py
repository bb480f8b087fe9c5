"""`make bench`: run the cases that were named, all by default, keep what they brought, and write the report.

The environment may say BENCH_ROUNDS (turns of each proxy), BENCH_SECONDS (a factor on how long each turn is), BENCH_GROWTH (seconds of
load in the case `rest`).
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

import uvloop

from benchmarks import results
from benchmarks.accounting import LOAD_CORE, TooFewCores, pinned_to
from benchmarks.cases import CASES
from benchmarks.peers import PROXIES, debian
from benchmarks.results import Section
from benchmarks.stage import Scale, Stage, say

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> int:
    """Returns the exit code: 2 when this machine cannot run it."""
    arguments = _arguments()
    if (missing := [reason for name in ("wrk", "nginx") if (reason := debian(name))]) or sys.platform != "linux":
        say("\n".join(missing) or "Linux is needed")
        return 2
    try:
        with pinned_to(LOAD_CORE):
            uvloop.run(run(arguments.cases or list(CASES), arguments.proxies, _scale(), arguments.to))
    except TooFewCores as error:
        say(str(error))
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the gateway beside its peers.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--proxies", nargs="*", choices=[proxy.name for proxy in PROXIES], default=[proxy.name for proxy in PROXIES])
    parser.add_argument("--to", type=Path, default=DOCS, help="the folder of performance.md and performance/; default: docs")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}")
    return arguments


def _scale() -> Scale:
    environ = os.environ
    return Scale(int(environ.get("BENCH_ROUNDS", 3)), float(environ.get("BENCH_SECONDS", 1)), growth=float(environ.get("BENCH_GROWTH", 60)))


async def run(cases: list[str], proxies: list[str], scale: Scale, to: Path) -> None:
    """Run the cases one after the other; what each brought is kept at once."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()
    for name in cases:
        section = await measured(name, proxies, scale)
        kept = results.read(to / "performance" / "results.json") | {name: section}
        results.write(to / "performance" / "results.json", kept)


async def measured(name: str, proxies: list[str], scale: Scale) -> Section:
    """One case, in a folder of its own that is gone afterwards."""
    say(f"== {name}")
    section = Section(name, "", scale.rounds, 0.0, results.machine(), {})
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-gateway-bench-") as folder:
        await CASES[name](Stage(section, scale, Path(folder), [proxy for proxy in PROXIES if proxy.name in proxies]))
    section.finished, section.seconds = datetime.now(UTC).isoformat(timespec="seconds"), round(monotonic() - began, 1)
    return section


if __name__ == "__main__":
    sys.exit(main())
