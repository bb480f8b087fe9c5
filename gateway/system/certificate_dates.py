"""The dates of certificates in a PEM file, and what they mean at a time. Pure.

``ssl`` reveals the dates of a peer's certificate only, so they are searched here in its bytes (RFC 5280, section 4.1). The rule: a chain
is valid as long as all of its certificates are. ``ssl`` has loaded them before, so invalid certificates are not explained here.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import NamedTuple

SOON = 7 * 86400.0
"""The end of a certificate is reported from this many seconds before it. The alert has the same."""
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_SHORT_YEAR = 0x17  # the tag of a time whose year has two digits
_TIME = rb"(\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)"
_VALIDITY = re.compile(rb"\x30." + _TIME + _TIME, re.DOTALL)
"""A sequence of two times. Each has a tag, its length, and digits in the only form that a certificate may have (section 4.1.2.5)."""


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
    except ValueError:
        return None
    return Validity(max(each.begins for each in found), min(each.expires for each in found)) if found else None


def _validity(certificate: bytes) -> Validity:
    if (found := _VALIDITY.search(certificate)) is None:
        raise ValueError("the certificate has no dates")
    return Validity(*map(_seconds, found.groups()))


def _seconds(time: bytes) -> float:
    text = time[2:].decode("ascii")
    if time[0] == _SHORT_YEAR:
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
