"""How the data path of this installation runs: as Python modules, or compiled (``make dist-compiled``)."""

from __future__ import annotations

from importlib.util import find_spec

_MODULE = "upstream.http.write_batching"  # one of the modules that are compiled


def core() -> str:
    """Return ``compiled`` if the modules of the data path are extension modules, else ``python``."""
    found = find_spec(_MODULE)
    return "compiled" if found is not None and found.origin is not None and not found.origin.endswith(".py") else "python"
