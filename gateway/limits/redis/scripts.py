"""The Lua scripts that a Redis runs: the rules of ``gateway.limits.decision`` for several gateways that count together.

Each ``.lua`` file names its Python twin. A script runs completely or not at all, and uses the store's clock, so the clocks of the
gateways do not matter. A reservation is stored until it is settled, so a settlement may be sent twice.
A lease that is not renewed expires, so the slots of a gateway that died become free.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files

NAMES = ("open", "admit", "settle", "renew", "read", "restore", "upgrade")


@dataclass(frozen=True, slots=True)
class Script:
    """A script in the form that Redis receives. ``digest`` is the SHA-1 that EVALSHA names."""

    text: str
    digest: str


def load_scripts() -> dict[str, Script]:
    """Read the scripts of ``NAMES`` from the package's files."""
    common = source("calendar") + source("common")
    return {name: _script(common + source(name)) for name in NAMES}


def source(name: str) -> str:
    """Return the text of one ``.lua`` file."""
    return (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")


def _script(text: str) -> Script:
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())
