"""Limits of the subjects of JWTs: each subject has its own, shares its team's, and shares its entry's if the counters are full."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

import pytest

from gateway.api.errors import Refusal
from gateway.limits import Limiter
from gateway.limits.reservation import reservation_of
from gateway.limits.shared_counts import Buckets
from gateway.snapshot.snapshot import Allowance, Key, Limits, Snapshot
from gateway.telemetry.metrics import WorkerMetrics
from tests.support.running import shared_counters

FULL = "rate_limit_exceeded"
TWO = Limits(requests_per_minute=2)
ENTRY = Key("staff", allowances=(Allowance("key staff", TWO),))
LAB = {"lab": (Allowance("team lab", Limits(requests_per_minute=3)),)}


def subject(name: str, team: str | None = None) -> Key:
    return Key(f"staff/{name}", entry="staff", team=team, allowances=(Allowance(f"key staff/{name}", TWO), *LAB.get(team or "", ())))


@pytest.fixture
def limiter(request: pytest.FixtureRequest) -> Iterator[Limiter]:
    memory = mmap.mmap(-1, request.param)
    struct.pack_into("<QQ", memory, 0, 1, 0)
    with shared_counters() as counts:
        made = Limiter(WorkerMetrics(counts), Buckets(memory), lambda _: None)
        made.apply_snapshot(Snapshot(1, (ENTRY,), (), teams=LAB))
        yield made


async def admitted(limiter: Limiter, key: Key, times: int) -> list[str | None]:
    """Send requests and return the code of each refusal; None for an admitted request."""
    return [await refusal_of(limiter, key, f"req_{key.id}_{number}") for number in range(times)]


async def refusal_of(limiter: Limiter, key: Key, identity: str) -> str | None:
    try:
        assert reservation_of(limiter, key, identity, {}).reserve_request() is None
    except Refusal as refusal:
        return refusal.code
    return None


@pytest.mark.parametrize("limiter", [1 << 20], indirect=True)
async def test_each_subject_has_its_own_and_its_teams_limits(limiter: Limiter) -> None:
    for name in ("alice", "bob"):
        assert await admitted(limiter, subject(name), 3) == [None, None, FULL]
    assert await admitted(limiter, subject("carol", "lab"), 2) == [None, None]
    assert await admitted(limiter, subject("dave", "lab"), 2) == [None, FULL]
    assert await admitted(limiter, subject("carol"), 1) == [FULL], "what was used in a team is used"


@pytest.mark.parametrize("limiter", [640], indirect=True)
async def test_without_room_subjects_share_the_limits_of_their_entry(limiter: Limiter) -> None:
    first = [await admitted(limiter, subject(f"early-{number}"), 3) for number in range(3)]
    assert first[0] == [None, None, FULL]
    assert await admitted(limiter, subject("late"), 1) + await admitted(limiter, subject("later"), 1) == [FULL, FULL]
    assert await admitted(limiter, ENTRY, 1) == [FULL]


@pytest.mark.parametrize("limiter", [1 << 14], indirect=True)
async def test_a_key_added_by_a_reload_has_room_after_any_number_of_subjects(limiter: Limiter) -> None:
    for number in range(100):
        await admitted(limiter, subject(f"subject-{number}"), 1)
    new = Key("new", allowances=(Allowance("key new", TWO),))
    limiter.apply_snapshot(Snapshot(2, (ENTRY, new), (), teams=LAB))
    assert await admitted(limiter, new, 3) == [None, None, FULL]
