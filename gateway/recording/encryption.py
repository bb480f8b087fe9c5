"""Encrypt records at rest: AES-256-GCM in chunks, with a key for each file.

A file is a header and its chunks. The header has a magic with the version, the ID of the key, and a random salt. The key of the file is
derived from the salt (HKDF-SHA256), so two files never share a key and a nonce. The nonce of a chunk is its number and whether it is the
last, and each chunk authenticates the header and the record's ID. So a file that was truncated, reordered or renamed is not decrypted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_MAGIC = b"VGREC\x00\x00\x01"
_KEY_ID, _SALT, _TAG, _KEY = 8, 32, 16, 32  # bytes
_HEADER = len(_MAGIC) + _KEY_ID + _SALT
_CHUNK = 64 * 1024  # bytes before encryption


class DecryptionError(Exception):
    """A file cannot be decrypted. ``str()`` says why."""


class Encryption:
    """Encrypts with the first of its keys, and decrypts with each of them. ``keys``: at least one, each of 32 bytes."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = {_key_id(key): key for key in keys}
        self._newest = next(iter(self._keys))

    def encrypt(self, identity: str, data: bytes) -> bytes:
        """Return the file of a record with this ID."""
        header = _MAGIC + self._newest + os.urandom(_SALT)
        cipher, bound = _cipher(self._keys[self._newest], header), header + identity.encode()
        pieces = [cipher.encrypt(nonce, data[start : start + _CHUNK], bound) for start, nonce in _nonces(len(data), _CHUNK)]
        return b"".join((header, *pieces))

    def decrypt(self, identity: str, file: bytes) -> bytes:
        """Return the record in a file. Raises DecryptionError."""
        from cryptography.exceptions import InvalidTag

        header, body = file[:_HEADER], file[_HEADER:]
        if len(header) < _HEADER or not header.startswith(_MAGIC):
            raise DecryptionError("the file has an unknown format")
        if (key := self._keys.get(header[len(_MAGIC) : len(_MAGIC) + _KEY_ID])) is None:
            raise DecryptionError("it was encrypted with another key; add that key to record.key")
        cipher, bound = _cipher(key, header), header + identity.encode()
        try:
            return b"".join(
                cipher.decrypt(nonce, body[start : start + _CHUNK + _TAG], bound) for start, nonce in _nonces(len(body), _CHUNK + _TAG)
            )
        except InvalidTag:
            raise DecryptionError("the file was changed or truncated, or is of another record") from None


def _key_id(key: bytes) -> bytes:
    """Return the ID of a key, from which the key cannot be derived."""
    return hashlib.sha256(b"vllm-gateway record key" + key).digest()[:_KEY_ID]


def _cipher(key: bytes, header: bytes) -> AESGCM:
    """Return the cipher of the file with this header."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # optional: for encrypted records only
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), _KEY, salt=header[-_SALT:], info=b"vllm-gateway record").derive(key))


def _nonces(size: int, step: int) -> Iterator[tuple[int, bytes]]:
    """Yield the start and the nonce of each chunk. There is at least one chunk."""
    starts = range(0, max(size, 1), step)
    for number, start in enumerate(starts):
        yield start, number.to_bytes(11, "big") + bytes([start == starts[-1]])
