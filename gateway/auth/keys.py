"""Generate, check and hash API keys.

A generated key is ``sk-<id8>_<43 base62>_<crc6>``: eight visible characters that identify its entry, 43 random characters (256
bits), and a checksum that detects a typo before any look-up. The rule: only the SHA-256 of a key is ever stored or compared. So
nothing here stores a key, and no look-up takes time that depends on one.
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
    """Generate a key for the principal ``key_id``, with 256 random bits from the operating system."""
    random_part = "".join(secrets.choice(BASE62) for _ in range(_RANDOM_LENGTH))
    body = f"sk-{visible_id(key_id)}_{random_part}"
    return f"{body}_{_checksum(body)}"


def visible_id(key_id: str) -> str:
    """Return the eight characters that all generated keys of a principal share.

    They come from the SHA-256 of the id. So the entry of a found key can be identified, and the key does not contain the
    id.
    """
    number = int.from_bytes(hashlib.sha256(key_id.encode("utf-8", "surrogatepass")).digest(), "big")
    return _base62(number % 62**_ID_LENGTH, _ID_LENGTH)


def has_key_format(token: str) -> bool:
    """Check whether ``token`` has the format of a generated key, whatever its checksum."""
    return _FORM.fullmatch(token) is not None


def has_valid_checksum(token: str) -> bool:
    """Check whether ``token`` has the format of a generated key and a correct checksum.

    The checksum is a CRC-32, which detects every change of a single character. A token in this format with a wrong checksum is a typing
    error or an invented key.
    """
    found = _FORM.fullmatch(token)
    return found is not None and _checksum(found[1]) == found[2]


def is_usable(token: str) -> bool:
    """Check whether a client can send ``token`` as a key: visible ASCII without spaces, not too long (see ``keyring``)."""
    return 0 < len(token) <= 512 and all("!" <= character <= "~" for character in token)


def hash_of(token: str) -> str:
    """Return the hash of a key that the configuration stores: ``sha256:`` and 64 lower-case hexadecimal digits of its UTF-8 bytes.

    Unpaired surrogates, which valid UTF-8 text never has, are hashed as the bytes that they stand for.
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
