"""Read stored records, for the commands ``record`` and ``replay``."""

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


def read_record(settings: Recording, identity: str) -> dict[str, Any]:
    """Return the record of a request by its ID. Raises RecordError."""
    try:
        store = open_store(settings)
        data = store.get(file_name(identity, ENCRYPTED))
        if data is None:
            data = store.get(file_name(identity, PLAIN))
        elif settings.encryption_keys:
            data = Encryption(settings.encryption_keys).decrypt(identity, data)
        else:
            raise RecordError("the record is encrypted; set record.key")
        document = None if data is None else orjson.loads(data)
    except (ValueError, DecryptionError, StoreError) as error:
        raise RecordError(str(error)) from error
    if data is None:
        raise RecordError(f"there is no record of {identity}: the request was not recorded, or its record has expired")
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise RecordError("the record has another version; read it with the version of the gateway that has written it")
    return document
