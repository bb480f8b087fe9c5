"""Cut many random streams, some of them twice, and compare each with its undisturbed stream.

``python -m tests.gateway.continuation [COUNT]`` prints the number of equal streams and each difference. Sampled streams follow.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter

from gateway.snapshot.snapshot import Resume
from tests.gateway.continuation.stage import (
    CHAT,
    COMPLETIONS,
    MANY_BYTES,
    REQUESTS,
    completion,
    sampled_trials,
    simulators,
    stage,
    stop_trial,
    trial,
)

COUNT, SAMPLED = 1000, 300
STOPPED = 0.3
"""The part of the streams that end at a random stop string."""


async def compare(count: int) -> int:
    """Compare so many streams. Returns the number of those that differ."""
    dice, results, different = random.Random(count), Counter[str](), 0
    for flags in ((), MANY_BYTES):
        with simulators(3, *flags) as servers:
            async with stage(servers) as one:
                for _ in range(count // 2):
                    name = dice.choice([*REQUESTS])
                    try:
                        if dice.random() < STOPPED:
                            outcome = await stop_trial(one, completion(prompt=name, max_tokens=80), dice)
                        else:
                            outcome = await trial(one, name, dice)
                        results.update(f"{each.path} {each.outcome}" for each in outcome.record.continuations)
                    except AssertionError as error:
                        different += 1
                        print(f"{name}: {error}", flush=True)
    with simulators(2) as servers:
        async with stage(servers, resume=Resume.SAMPLED) as one:
            for path in (CHAT, COMPLETIONS):
                await sampled_trials(one, path, SAMPLED // 2)
    print(f"{SAMPLED} sampled streams: no token was lost or repeated")
    print(f"{count - different} of {count} streams are equal; continuations: {dict(results)}")
    return different


if __name__ == "__main__":
    raise SystemExit(asyncio.run(compare(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)) > 0)
