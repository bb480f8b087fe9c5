"""Commands as the bytes that a Redis or a Sentinel receives."""

from __future__ import annotations

from typing import Any, cast

from hiredis import pack_command

from gateway.snapshot.snapshot import LimitsStore


def packed_command(*parts: str | int) -> bytes:
    """Return the bytes of a command."""
    packed: bytes = pack_command(cast(Any, parts))  # hiredis declares tuples of one part
    return packed


def authentication(settings: LimitsStore) -> list[bytes]:
    """Return the command that authenticates a connection, if there is a password."""
    if settings.password is None:
        return []
    return [packed_command("AUTH", *([settings.user] if settings.user else []), settings.password)]
