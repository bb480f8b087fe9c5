"""Fuzzes one target with atheris, in the environment that ``tests/fuzz/install.py`` makes. ``make fuzz`` runs all, one after the other.

``python tests/fuzz/run.py TARGET [libFuzzer's own options and folders]``; the first folder gets what is new.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["gateway", "upstream", "fuzz", "yaml", "python_multipart"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    name, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
