"""The work by which the C compiler learns which branches are taken often. ``hook`` runs it with an instrumented core.

The rule: what is frequent is trained, because the compiler makes everything else small instead of fast.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from itertools import cycle

from gateway.ledger.journal import Journal
from gateway.snapshot.snapshot import Limits
from gateway.system.compiled_core import core
from tests.support.exchange import CHUNKS, COUNTED_CHUNKS, OTHER_REQUEST, REQUEST, exchange

_TIMES = 2000
_LIMITS = Limits(10**9, 10**12, tokens_per_day=10**15, tokens_per_month=10**15, concurrent=100)


async def train(*, with_ledger: bool, limits: Limits | None) -> None:
    """Serve requests with one key and with two keys, streams, and the chunks of one stream."""
    chunks = COUNTED_CHUNKS if with_ledger or limits else CHUNKS
    with closing(Journal.create("training")) as journal:
        async with exchange() as one:
            if with_ledger:
                one.record(journal)
            if limits is not None:
                one.limit(limits)
            for sent in (REQUEST, OTHER_REQUEST):
                for _ in range(_TIMES):
                    one.serve()
                    one.serve(sent)
                    one.stream(chunks)
                    one.finish_stream()
            one.stream(chunks)
            received = cycle(zip(chunks, CHUNKS, strict=True))
            for _ in range(10 * _TIMES):
                one.receive(received)


async def main() -> None:
    """Train every combination of a ledger and limits."""
    for with_ledger in (False, True):
        for limits in (None, _LIMITS):
            await train(with_ledger=with_ledger, limits=limits)


if __name__ == "__main__":
    if core() != "compiled":
        sys.exit("The training needs the instrumented core, and has found the Python modules.")
    asyncio.run(main())
