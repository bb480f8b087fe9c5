"""What may remain while the texts are rewritten: a number of findings for each file, which may only fall.

The rule: no listed file has more findings than its number, and all files together have no more than all numbers together.
So a file can be moved, split or joined without a change of the list, and no text gets worse. When the list is empty, delete it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def load(file: Path) -> dict[str, int]:
    """Read the numbers by path; a missing file allows nothing."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def store(file: Path, counts: Mapping[str, int]) -> None:
    """Write the numbers of the files that still have findings, or delete the list if no file has."""
    left = {path: number for path, number in sorted(counts.items()) if number}
    if left:
        file.write_text(json.dumps(left, indent=0) + "\n")
    else:
        file.unlink(missing_ok=True)


def worse(counts: Mapping[str, int], listed: Mapping[str, int]) -> list[str]:
    """Return the paths to complain about: listed files with more findings, and unlisted ones if the total has grown as well."""
    grown = [path for path in counts if path in listed and counts[path] > listed[path]]
    if sum(counts.values()) > sum(listed.values()):
        grown += [path for path in counts if path not in listed and counts[path]]
    return sorted(grown)
