"""Streams of a real vLLM that only a second response can continue are like undisturbed ones after their server was cut off."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from gateway.api.routes import ROUTES
from tests.faults.chaos import Weather
from tests.gateway.continuation.streams import view_of
from tests.gateway.proxy.test_regenerated import sent
from tests.support.shared import Shared
from tests.support.wire import request
from tests.vllm.continuation import FLAGS, REGENERATED, ROWS, Row, stored
from tests.vllm.server import NOT_INSTALLED, installed, running

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

OUTCOMES = stored()
REGENERATED_ROWS = [row for row in ROWS if OUTCOMES[row.path, row.feature]["outcome"] == REGENERATED]
CUTS = 3
TRIES = 10
"""vLLM shows markup of calls in a chat with ``stop`` if an event has several tokens. On a busy machine even whole streams may differ."""


@pytest.fixture(scope="module", params=["@scale_out"])
def servers(shared: Shared, request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    one = shared.once(request.param, lambda: running("qwen3", flags=FLAGS["qwen3"]))
    with running("qwen3", flags=FLAGS["qwen3"]) as other:
        yield one.port, other.port


@pytest.mark.parametrize("row", REGENERATED_ROWS, ids=lambda row: f"{row.path} {row.feature}")
async def test_a_cut_stream_is_like_an_undisturbed_one(servers: tuple[int, int], row: Row) -> None:
    data, dialect, dice = (
        request({"model": "tiny", "stream": True, **row.body}, row.path),
        ROUTES[row.path].dialect,
        random.Random(row.feature),
    )
    whole, expected, size = await sent(data, *servers)
    outcomes = []
    for _ in range(CUTS):
        for _ in range(TRIES if row.feature == "`stop`, tools" else 1):
            reply, record, _ = await sent(data, *servers, first=Weather(cut_at=dice.randrange(size // 3, size // 2)))
            undisturbed = view_of(without_cached_tokens(whole.body), dialect)
            continued = view_of(without_cached_tokens(reply.body), dialect) if record.incomplete is None else None
            if continued == undisturbed:
                break
            whole, expected, size = await sent(data, *servers)
        assert (reply.status, continued) == (200, undisturbed)
        assert expected.usage is not None and record.usage is not None and record.incomplete is None
        assert (record.usage.prompt, record.usage.completion) == (expected.usage.prompt, expected.usage.completion)
        outcomes += [each.outcome for each in record.continuations]
    assert set(outcomes) == {"continued"}, "a stream with larger groups of tokens may be too short for a cut"


def without_cached_tokens(stream: bytes) -> bytes:
    """Return a stream without the number of cached tokens, which each server has for itself."""
    return re.sub(rb'"cached_tokens":\d+', b'"cached_tokens":0', stream)
