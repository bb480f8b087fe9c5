"""Read stored records, for the commands ``record`` and ``replay``, and for the console."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.recording.document import VERSION
from gateway.recording.encryption import DecryptionError, Encryption
from gateway.recording.names import ENCRYPTED, PLAIN, file_name
from gateway.recording.stores import StoreError, open_store
from gateway.snapshot.snapshot import Recording


class RecordError(Exception):
    """A record cannot be read. ``str()`` says why, for the operator."""


class NoRecordError(RecordError):
    """A request has no record, or a text is not the ID of a request."""


def read_record(settings: Recording, identity: str) -> dict[str, Any]:
    """Return the record of a request by its ID. Raises RecordError."""
    try:
        return _read(settings, identity)
    except (ValueError, DecryptionError, StoreError) as error:
        raise RecordError(str(error)) from error


def _read(settings: Recording, identity: str) -> dict[str, Any]:
    try:
        encrypted, plain = (file_name(identity, end) for end in (ENCRYPTED, PLAIN))
    except ValueError as error:
        raise NoRecordError(str(error)) from error
    store = open_store(settings)
    if (data := store.get(encrypted)) is not None:
        if not settings.encryption_keys:
            raise RecordError("the record is encrypted; set record.key")
        data = Encryption(settings.encryption_keys).decrypt(identity, data)
    else:
        data = store.get(plain)
    if data is None:
        raise NoRecordError(f"there is no record of {identity}: the request was not recorded, or its record has expired")
    document = orjson.loads(data)
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise RecordError("the record has another version; read it with the version of the gateway that has written it")
    return document
