"""Rows as bytes, also those of earlier versions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.ledger.row import decode, encode
from tests.gateway.ledger.rows import row
from tests.support.money import price

EARLIER = bytes.fromhex(
    "dc0017a57265715f31cb41dad27480200000b42f76312f636861742f636f6d706c6574696f6e73a67465616d2d61a87265736561726368"
    "a474696e79a674696e792330c3ccc8c0c00a05020100cb3fd0000000000000cb3fb999999999999acb000000000000000092cb3fc99999"
    "9999999acb3fe999999999999a81ab636f73745f63656e746572a23137c0c0"
)
"""A row that an earlier version has written, with the prices 0.2 and 0.8."""


def test_a_row_is_decoded_as_it_was_encoded() -> None:
    full = row(price=price(0.2, 0.8, cached=0.02, reasoning=1.6), labels={"a": "b"}, user="u", metadata={"m": [1]})
    assert decode(encode(full)) == full


def test_a_row_of_an_earlier_version_keeps_its_prices() -> None:
    """Its spool may contain rows when the gateway is updated. They have two prices in units of the currency."""
    found = decode(EARLIER)
    assert found.price == price(0.2, 0.8)
    assert (found.id, found.prompt, found.completion, found.labels) == ("req_1", 10, 5, {"cost_center": "17"})
    assert found.cost == 10 * 200 + 5 * 800


def test_a_row_of_an_earlier_version_without_a_price_has_none() -> None:
    fields: list[Any] = msgspec.msgpack.decode(EARLIER)
    fields[19] = None
    assert decode(msgspec.msgpack.encode(fields)).cost is None


@pytest.mark.parametrize(
    ("fields", "completion", "estimated_by"),
    [
        ({"completion": None, "first_token": 0.1}, 7, "events"),
        ({"completion": 5, "first_token": 0.1}, 7, "events"),
        ({"completion": 7, "first_token": 0.1}, 7, None),
        ({"completion": None, "first_token": None}, None, None),
        ({"completion": None, "first_token": 0.1, "estimated_by": "journal"}, 7, "journal"),
    ],
)
def test_the_events_of_an_earlier_version_are_an_estimate(fields: dict[str, Any], completion: int | None, estimated_by: str | None) -> None:
    found = decode(encode(row(chunks=7, **fields)))
    assert (found.completion, found.estimated_by, found.chunks) == (completion, estimated_by, 0)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({}), msgspec.msgpack.encode(["a", 1.0])])
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)


@pytest.mark.parametrize("invalid", [[], [1.0], [1, 2], [1.0, "a"], [1.0, 2.0, 3.0], [1.0, float("nan")], [float("inf"), 1.0], 5])
def test_a_row_with_an_invalid_price_is_refused(invalid: object) -> None:
    fields: list[Any] = msgspec.msgpack.decode(EARLIER)
    fields[19] = invalid
    with pytest.raises(msgspec.DecodeError):
        decode(msgspec.msgpack.encode(fields))
