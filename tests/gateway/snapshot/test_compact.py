"""A value without its defaults is decoded as the same value."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.snapshot.compact import without_defaults
from gateway.snapshot.snapshot import Allowance, Budget, Key, Limits

_amount = st.none() | st.integers(1, 2**53)
_budgets = st.builds(
    Budget, window=st.sampled_from(("7d", "day")), seconds=st.just(604800.0), tokens=_amount, cost=_amount, soft=st.booleans()
)
_limits = st.builds(
    Limits,
    requests_per_minute=_amount,
    cost_per_day=_amount,
    concurrent=_amount,
    budgets=st.lists(_budgets, max_size=2).map(tuple),
    session=st.none() | _budgets,
)
_names = st.text(max_size=4)
_keys = st.builds(
    Key,
    id=_names,
    digests=st.lists(st.binary(min_size=32, max_size=32), max_size=2).map(tuple),
    models=st.none() | st.lists(_names, max_size=2).map(tuple),
    expires=st.none() | st.floats(0, 1e10),
    fields=st.dictionaries(_names, st.integers(0, 9) | _names, max_size=2),
    digest_expiries=st.dictionaries(st.binary(min_size=32, max_size=32), st.floats(0, 1e10), max_size=2),
    weight=st.sampled_from((0.5, 1.0, 2.0)),
    allowances=st.lists(st.builds(Allowance, _names, _limits, st.none() | st.just(("a*",))), max_size=2).map(tuple),
    revoked=st.booleans(),
    team=st.none() | _names,
    labels=st.dictionaries(_names, _names, max_size=2),
    user_header=st.none() | st.binary(max_size=4),
)


@given(_keys)
def test_a_key_is_decoded_as_it_was(key: Key) -> None:
    encoded = msgspec.msgpack.encode(without_defaults(key))
    assert msgspec.msgpack.decode(encoded, type=Key) == key
    assert len(encoded) <= len(msgspec.msgpack.encode(key))


def test_only_what_differs_is_encoded() -> None:
    assert without_defaults(Key("alice", digests=(b"1",))) == {"id": "alice", "digests": [b"1"]}
