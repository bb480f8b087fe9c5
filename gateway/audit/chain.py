"""The chain: an entry is a line of JSON that ends with an HMAC of the line and of the HMAC before it. Pure.

The rules: the HMAC is over the bytes of the line as they are stored, so a reader never has to write JSON in the same way. The HMAC of the
last line proves all lines before it. A checkpoint names this HMAC and the number of its line, and is signed, so that a copy of it
elsewhere shows that lines were removed at the end.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

import msgspec

from gateway.audit.entry import Entry

START = "0" * 64
"""Stands for the HMAC before the first line."""
_MAC = b',"mac":"'
_END = b'"}'
_TAIL = len(_MAC) + 64 + len(_END)
_CHECKPOINT = re.compile(r"audit checkpoint ([0-9a-f]{32}) (\d{1,18}) ([0-9a-f]{64}) ([0-9a-f]{64})\b")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The end of a chain: its last line's number and HMAC. ``seq`` is 0, and ``mac`` is START, while it has no line."""

    chain: str
    seq: int
    mac: str

    def signed(self, key: bytes) -> str:
        """Return the checkpoint as text for the log, with its signature."""
        text = f"audit checkpoint {self.chain} {self.seq} {self.mac}"
        return f"{text} {_hmac(key, text.encode())}"


def signed_checkpoints(text: str, key: bytes) -> list[Checkpoint]:
    """Return the checkpoints in a text, for example a log. Those that are signed with another key are omitted."""
    checkpoints = []
    for chain, seq, mac, signature in _CHECKPOINT.findall(text):
        checkpoint = Checkpoint(chain, int(seq), mac)
        if hmac.compare_digest(checkpoint.signed(key)[-64:], signature):
            checkpoints.append(checkpoint)
    return checkpoints


class Line(msgspec.Struct, frozen=True):
    """A line as a reader finds it. ``time`` is aware and in UTC."""

    chain: str
    seq: int
    time: datetime
    action: str
    actor: dict[str, Any]
    origin: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    mac: str


_decoder = msgspec.json.Decoder(Line)


def next_line(checkpoint: Checkpoint, entry: Entry, time: datetime, key: bytes) -> tuple[bytes, Checkpoint]:
    """Return the line of an entry, without a line break, and the checkpoint after it. ``time`` is aware and in UTC.

    Raises TypeError if the entry contains a value that JSON does not have.
    """
    actor = entry.actor
    fields = {
        "chain": checkpoint.chain,
        "seq": checkpoint.seq + 1,
        "time": time,
        "action": entry.action,
        "actor": {"kind": actor.kind, "name": actor.name, "role": actor.role, "teams": sorted(actor.teams)},
        "origin": entry.origin,
        "target": entry.target,
        "before": entry.before,
        "after": entry.after,
    }
    body = msgspec.json.encode(fields)
    mac = _line_hmac(key, checkpoint.mac, body)
    return body[:-1] + _MAC + mac.encode() + _END, Checkpoint(checkpoint.chain, checkpoint.seq + 1, mac)


def read_line(data: bytes) -> Line | None:
    """Return the content of a line, None for other text."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_next(data: bytes, before: str, key: bytes) -> bool:
    """Return whether a line has the HMAC that follows the HMAC ``before``."""
    if len(data) < _TAIL or data[-_TAIL:][: len(_MAC)] != _MAC or not data.endswith(_END):
        return False
    return hmac.compare_digest(_line_hmac(key, before, data[:-_TAIL] + b"}").encode(), data[-_TAIL + len(_MAC) : -len(_END)])


def _line_hmac(key: bytes, before: str, body: bytes) -> str:
    return _hmac(key, before.encode() + body)


def _hmac(key: bytes, data: bytes) -> str:
    return hmac.digest(key, data, sha256).hex()
