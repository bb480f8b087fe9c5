"""Rows as bytes."""

from __future__ import annotations

import msgspec
import pytest

from gateway.ledger.row import decode, encode
from tests.gateway.ledger.rows import row
from tests.support.money import price


def test_a_row_is_decoded_as_it_was_encoded() -> None:
    full = row(price=price(0.2, 0.8, cached=0.02, reasoning=1.6), labels={"a": "b"}, user="u", metadata={"m": [1]})
    assert decode(encode(full)) == full


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({}), msgspec.msgpack.encode(["a", 1.0])])
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)
