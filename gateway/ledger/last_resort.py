"""When a process ends, write the rows that could not be stored to standard error, one JSON object on each line.

The rule: no row is lost silently. A row contains neither prompts nor responses (see ``row.UsageRow``), so a line shows no more than
the access log and, if configured, ``user`` and ``metadata``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

import msgspec

from gateway.ledger.row import decode

_log = logging.getLogger("vllm_gateway.ledger")


def write_out(payloads: Sequence[bytes], stream: TextIO) -> None:
    """Write each row as ``{"ledger_row": {…}}``, with the names of ``UsageRow``'s fields. Invalid payloads are omitted."""
    _log.error("%d rows of the ledger cannot be stored, neither in its spool nor in its database; each follows as JSON", len(payloads))
    with suppress(OSError, ValueError):  # standard error is closed, or its disk is full as well
        for payload in payloads:
            with suppress(msgspec.DecodeError):
                stream.write(msgspec.json.encode({"ledger_row": msgspec.structs.asdict(decode(payload))}).decode() + "\n")
        stream.flush()
