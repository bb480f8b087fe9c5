"""The dates of certificates in a PEM file, and what they mean at a time. Pure.

``ssl`` reveals the dates of a peer's certificate only, so the few fields before them are read here (RFC 5280, section 4.1). The rule: a
chain is valid as long as all of its certificates are. ``ssl`` has loaded them before, so invalid certificates are not explained here.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

SOON = 7 * 86400.0
"""Seconds before the end of a certificate from which on its end is reported. The alert has the same."""
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _SHORT_YEAR = 0xA0, 0x17  # tags: the optional first field of a certificate, and a time whose year has two digits


class Validity(NamedTuple):
    """When a certificate chain is valid, in seconds since the epoch."""

    begins: float
    expires: float

    def problem(self, now: float) -> str | None:
        """Explain why clients reject the chain at a time; None if its dates are right."""
        if now >= self.expires:
            return f"has expired on {_date(self.expires)}, so clients reject it"
        if now < self.begins:
            return f"is not valid before {_date(self.begins)}, so clients reject it; is the clock of this machine right?"
        return None

    def warning(self, now: float) -> str | None:
        """Explain that the chain expires soon; None if it does not, or has expired."""
        return f"expires on {_date(self.expires)}" if self.expires - SOON <= now < self.expires else None


def validity(pem: bytes) -> Validity | None:
    """Return when all certificates of a file are valid; None if there is no certificate, or its dates cannot be read."""
    try:
        found = [_validity(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))) for block in _BLOCK.findall(pem)]
    except (ValueError, IndexError):
        return None
    return Validity(max(each.begins for each in found), min(each.expires for each in found)) if found else None


def _validity(certificate: bytes) -> Validity:
    _, start, end = _element(certificate, 0)
    _, start, end = _element(certificate, start)
    fields = [each for each in _elements(certificate, start, end) if each[0] != _VERSION]
    _, start, end = fields[3]  # behind the serial number, the signature's algorithm and the issuer
    begins, expires = (_time(tag, certificate[first:last]) for tag, first, last in _elements(certificate, start, end))
    return Validity(begins, expires)


def _elements(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    while at < end:
        element = _element(data, at)
        yield element
        at = element[2]


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at a position, and where its content starts and ends."""
    tag, size, at = data[at], data[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size, at = int.from_bytes(data[at : at + count], "big"), at + count
    return tag, at, at + size


def _time(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _SHORT_YEAR:
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
