"""The cost of the prefix index beside parsing: ``python -m tests.benchmarks.prefix.index_cost`` prints the ratios of one run.

A prompt of 30 KB is hashed, and matched against servers that all have it cached, which is the slowest case. A worker shares
it with the others by a write to the placement log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import orjson

from gateway.prompts.blocks import prompt_of
from gateway.system.steps import finished
from upstream.balancing.placement_log import Kind, PlacementLog
from upstream.balancing.prefix_index import PrefixIndex

_ROUNDS, _CALLS = 7, 500


def seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call, of the fastest of several rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.process_time()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.process_time() - began) / _CALLS)
    return best


def main() -> None:
    """Print the ratios."""
    document = {"model": "m", "messages": [{"role": "system", "content": "Why is the sky blue today? " * 1110}]}
    body = orjson.dumps(document)
    keys = finished(prompt_of(document)).keys
    parse, hashing = seconds(lambda: orjson.loads(body)), seconds(lambda: finished(prompt_of(document)))
    print(f"{len(body)} bytes, {len(keys)} blocks; orjson.loads: {parse * 1e6:.1f} µs; hashing: {hashing / parse:.2f} times that")
    for count in (1, 16, 64, 200):
        index = PrefixIndex()
        for number in range(count):
            index.add_server(f"s{number}")
            index.insert(f"s{number}", keys)
        matching = seconds(lambda index=index: index.matched(keys))  # type: ignore[misc]
        print(f"{count} servers: matching {matching / parse:.2f} times, together {(hashing + matching) / parse:.2f} times")
    with closing(PlacementLog.create(1, 0)) as log:
        writing = seconds(lambda: log.write(Kind.PLACED, 1, 100, keys))
    print(f"a write to the placement log: {writing / parse:.2f} times")


if __name__ == "__main__":
    main()
