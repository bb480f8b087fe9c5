"""Encryption: what was encrypted is decrypted, by an old key too, and nothing that was changed is."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.recording.encryption import DecryptionError, Encryption

pytest.importorskip("cryptography", reason="the extra record is not installed")

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
ID = "req_68f0a1b2c3d4e5f60718293a"
CHUNK = 64 * 1024


@given(st.binary(max_size=100))
def test_the_data_comes_back(data: bytes) -> None:
    one = Encryption([NEW])
    file = one.encrypt(ID, data)
    assert one.decrypt(ID, file) == data
    assert len(data) < 8 or data not in file


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_the_data_comes_back_in_chunks(size: int) -> None:
    data = os.urandom(size)
    assert Encryption([NEW]).decrypt(ID, Encryption([NEW]).encrypt(ID, data)) == data


def test_after_a_rotation_files_of_both_keys_are_read() -> None:
    before, after = Encryption([OLD]), Encryption([NEW, OLD])
    assert after.decrypt(ID, before.encrypt(ID, b"old")) == b"old"
    assert after.decrypt(ID, after.encrypt(ID, b"new")) == b"new"
    with pytest.raises(DecryptionError, match="another key"):
        before.decrypt(ID, after.encrypt(ID, b"new"))


def test_two_files_of_the_same_data_differ() -> None:
    one = Encryption([NEW])
    assert len({one.encrypt(ID, b"data")[16:] for _ in range(20)}) == 20


def test_a_changed_file_is_not_read() -> None:
    one = Encryption([NEW])
    file = one.encrypt(ID, b"data" * 10)
    for position in range(len(file)):
        changed = bytearray(file)
        changed[position] ^= 1
        with pytest.raises(DecryptionError):
            one.decrypt(ID, bytes(changed))
    for size in range(len(file)):
        with pytest.raises(DecryptionError):
            one.decrypt(ID, file[:size])


def test_chunks_cannot_be_removed_or_exchanged() -> None:
    one, step = Encryption([NEW]), CHUNK + 16
    file = one.encrypt(ID, bytes(2 * CHUNK + 5))
    header, body = file[:48], file[48:]
    first, second, last = body[:step], body[step : 2 * step], body[2 * step :]
    assert one.decrypt(ID, header + first + second + last) == bytes(2 * CHUNK + 5)
    for chunks in ((first, second), (second, first, last), (first, last), (first, first, last)):
        with pytest.raises(DecryptionError):
            one.decrypt(ID, header + b"".join(chunks))


def test_a_file_of_another_record_is_not_read() -> None:
    one = Encryption([NEW])
    with pytest.raises(DecryptionError, match="of another record"):
        one.decrypt("req_" + "0" * 24, one.encrypt(ID, b"data"))
