"""``make proxies``: a million requests through all proxies, and docs/proxies.md.

The rules: every figure was counted by the run of its row. A run is a tenth of the requests, so that its files stay small, and each has
its own seed. The command fails if a check failed, and prints what it found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.report import ROOT, machine
from tests.proxies.fronts import FRONTS
from tests.proxies.run import SHARING, WORKERS, Findings, Scenario, run
from tests.proxies.secrets import KEYS
from tests.proxies.traffic import KINDS

PAGE = ROOT / "docs" / "proxies.md"
_ROUNDS = (
    ("nginx", False), ("haproxy", False), ("envoy", False), (SHARING, False), ("haproxy", True),
    ("nginx", False), ("haproxy", False), ("envoy", False), ("nginx", True), ("envoy", False),
)  # fmt: skip
"""The proxy of each run, and whether its connections to the gateway use TLS."""
_SLOW = 5
"""``sharing`` waits after each cut, and gets a fifth of the requests of another run."""
_INTRODUCTION = f"""\
# Shared connections

This page lets you check that a proxy in front of the gateway, which sends the requests of many clients on few connections, never mixes
them up.

`make proxies` starts a gateway with {WORKERS} workers and {KEYS:,} keys (some are subjects of an identity provider), and a proxy
with a few connections to it. Half of these connections are cut at other bytes than the proxy wrote. Each request has a secret, which the
model server repeats. A part of the requests is hostile: {", ".join(KINDS)}. `{SHARING}` is a proxy of the tests that forwards headers
unchanged.

Each run checks that

- no response contains a secret of another client,
- every ordinary response of status 200 contains the secret of its request,
- the server received each secret once, and the access log has that request under the secret's own key,
- no request without a valid key reached the server, nor a request in the body of another.

A failed request has no response of status 200: a hostile client made the gateway or the proxy close a connection while the proxy was
using it.
"""


def rendered(runs: Sequence[Findings], commit: str) -> str:
    """Render the page."""
    used = sorted({found.scenario.front for found in runs} - {SHARING})
    versions = ", ".join(f"{name} {FRONTS[name].version()}" for name in used)
    lines = [
        "| proxy | seed | requests | hostile | received by the server | failed | violations | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in runs:
        scenario, failed = found.scenario, ", ".join(f"{count:,} {name}" for name, count in found.failed.most_common()) or "0"
        front = scenario.front + " with TLS to the gateway" * scenario.tls
        counts = f"{found.sent:,} | {found.hostile.total():,} | {found.executed:,} | {failed} | {len(found.violations)}"
        lines.append(f"| {front} | {scenario.seed} | {counts} | {found.seconds:,.0f} |")
    sent, seconds = sum(found.sent for found in runs), sum(found.seconds for found in runs)
    total = f"{sent:,} requests in {seconds:,.0f} seconds ({sent / seconds:,.0f} per second), commit {commit}, {versions}."
    kinds = sum((found.hostile for found in runs), Counter[str]())
    hostile = "Hostile clients: " + ", ".join(f"{name} {kinds[name]:,}" for name in KINDS) + "."
    return "\n".join([_INTRODUCTION, f"{total} {machine()}", "", *lines, "", hostile, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all proxies and write the page. Return 1 if a check failed or a proxy is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[*FRONTS, SHARING], help="these proxies; writes no page")
    parser.add_argument("--to", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    missing = [f"{name}: {reason}" for name, front in FRONTS.items() if (reason := front.missing())]
    if missing and not options.only:
        print(*missing, sep="\n", file=sys.stderr)
        return 1
    runs, each = [], options.requests * _SLOW // (len(_ROUNDS) * _SLOW - _SLOW + 1)
    for number, (front, tls) in enumerate(_ROUNDS):
        if not options.only or front in options.only:
            found = run(Scenario(front, each // _SLOW if front == SHARING else each, options.seed + number, tls))
            print(f"{front}{' with TLS' * tls}, seed {options.seed + number}: {found.sent:,} requests, {found.seconds:.0f} s", flush=True)
            print(*found.violations, sep="\n", end="", file=sys.stderr)
            runs.append(found)
    if not options.only:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        options.to.write_text(rendered(runs, commit))
    return int(any(found.violations for found in runs))


if __name__ == "__main__":
    sys.exit(main())
