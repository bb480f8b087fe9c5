"""What a client's key looks like, how one is minted, and how it is known again.

A minted key is ``sk-<id8>_<43 base62>_<crc6>``: eight visible characters that tell whose key it is, 43 random
ones (256 bits), and a checksum that catches a slip of the pen before any look-up. The rule: only the SHA-256
of a key is ever stored or compared, so nothing here keeps a key, and no look-up takes time that depends on one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_ID_LENGTH, _RANDOM_LENGTH, _CHECKSUM_LENGTH = 8, 43, 6
_FORM = re.compile(rf"(sk-[0-9A-Za-z]{{{_ID_LENGTH}}}_[0-9A-Za-z]{{{_RANDOM_LENGTH}}})_([0-9A-Za-z]{{{_CHECKSUM_LENGTH}}})")


def mint(key_id: str) -> str:
    """A fresh key for the principal ``key_id``, with 256 random bits from the operating system."""
    random_part = "".join(secrets.choice(BASE62) for _ in range(_RANDOM_LENGTH))
    body = f"sk-{visible_id(key_id)}_{random_part}"
    return f"{body}_{_checksum(body)}"


def visible_id(key_id: str) -> str:
    """The eight characters that all minted keys of one principal share.

    They come from the SHA-256 of the id: whoever finds a key can tell whose it is by the configuration,
    and the key does not spell the id out.
    """
    number = int.from_bytes(hashlib.sha256(key_id.encode()).digest(), "big")
    return _base62(number % 62**_ID_LENGTH, _ID_LENGTH)


def has_key_format(token: str) -> bool:
    """Whether ``token`` has the grammar of a minted key, whatever its checksum says."""
    return _FORM.fullmatch(token) is not None


def has_valid_checksum(token: str) -> bool:
    """Whether ``token`` has the grammar of a minted key and its checksum is right.

    The checksum is a CRC-32, which finds every change of a single character. A token that is
    ``has_key_format`` but not ``has_valid_checksum`` was mistyped or made up.
    """
    found = _FORM.fullmatch(token)
    return found is not None and _checksum(found[1]) == found[2]


def is_usable(token: str) -> bool:
    """Whether a client can send ``token`` as a key: one word of visible ASCII, not too long (see ``auth``)."""
    return 0 < len(token) <= 512 and all("!" <= character <= "~" for character in token)


def hash_of(token: str) -> str:
    """What the configuration holds of a key: ``sha256:`` and 64 lower-case hexadecimal digits of its UTF-8 bytes.

    Unpaired surrogates, which no UTF-8 text has, are hashed as the bytes they stand for.
    """
    return "sha256:" + hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), _CHECKSUM_LENGTH)


def _base62(number: int, length: int) -> str:
    digits: list[str] = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return "".join(reversed(digits))
