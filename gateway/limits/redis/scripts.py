"""The Lua scripts that a Redis runs: the rules of ``gateway.limits.rules`` for several gateways that count together.

Each ``.lua`` file names its Python twin. A script runs completely or not at all, and uses the store's clock, so the clocks of the
gateways do not matter. A reservation is stored until it is settled, so a settlement may be sent twice.
A lease that is not renewed expires, so the slots of a gateway that died become free.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import sha1
from importlib.resources import files

_ALONE = ("open", "renew", "upgrade")  # scripts that use nothing of ``common``


@dataclass(frozen=True, slots=True)
class Script:
    """A script in the form that Redis receives. ``digest`` is the SHA-1 that EVALSHA names."""

    text: str
    digest: str


@dataclass(frozen=True, slots=True)
class Scripts:
    """All scripts of the limits store."""

    open: Script
    admit: Script
    settle: Script
    renew: Script
    read: Script
    restore: Script
    upgrade: Script


def load_scripts() -> Scripts:
    """Read the scripts from the package's files."""
    common = source("calendar") + source("common")
    texts = {each.name: source(each.name) for each in fields(Scripts)}
    return Scripts(**{name: _script(text if name in _ALONE else common + text) for name, text in texts.items()})


def source(name: str) -> str:
    """Return the text of one ``.lua`` file."""
    return (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")


def _script(text: str) -> Script:
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())
