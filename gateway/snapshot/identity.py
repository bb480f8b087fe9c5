"""The text of a token's subject: its row key in the ledger, the name of its counts, its ID in logs and traces. Pure.

A subject is the pair of its entry's ID and the name that the provider gave it. The rule: distinct pairs have distinct texts, whatever the
two contain. The first slash of a text ends the entry, so slashes of the entry's ID are escaped. Slashes are more frequent in subjects,
which are not escaped: ``staff/alice``. No configured ID starts like the text of a subject (see
``config/references``).
"""

from __future__ import annotations


def subject_id(entry: str, subject: str) -> str:
    """Return the text of a subject of an entry."""
    return subject_prefix(entry) + subject


def escaped(entry: str) -> str:
    """Return an entry's ID without slashes."""
    return entry.replace("%", "%25").replace("/", "%2F")


def subject_prefix(entry: str) -> str:
    """Return how the row keys of an entry's subjects start."""
    return f"{escaped(entry)}/"
