"""The IDs of requests: unique, in the order of their seconds, and random enough to draw a sample by them."""

from __future__ import annotations

import itertools
import re
from time import time

from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.request_ids import RequestSample, request_ids


def test_an_id_has_its_second_and_random_digits() -> None:
    before = int(time())
    ids = list(itertools.islice(request_ids(), 2000))
    assert len(set(ids)) == 2000
    assert all(re.fullmatch("req_[0-9a-f]{24}", each) for each in ids)
    assert all(before <= int(each[4:12], 16) <= time() for each in ids)


@given(st.floats(min_value=0.01, max_value=1))
def test_a_share_of_the_requests_is_taken(share: float) -> None:
    sample, ids = RequestSample(share), request_ids()
    taken = sum(sample.includes(next(ids)) for _ in range(2000))
    assert abs(taken - 2000 * share) < 250  # ten deviations at least
