"""``python -m tests.fuzz SECONDS [TARGET …]``: run the targets of ``targets.py`` with atheris, and the differential ones.

Each target runs for SECONDS. New inputs of the first are written to ``fuzz/found``, by target, and inputs that made one fail as
``TARGET-crash-…``. A difference of the second prints its seed and number. The seed is new in each run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.differential.registry import TARGETS as DIFFERENTIAL
from tests.fuzz.install import FOLDER
from tests.fuzz.targets import CORPUS, TARGETS

FOUND = CORPUS.parent / "found"
_OPTIONS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1", "-verbosity=0")


def main() -> int:
    """Return the number of targets that failed."""
    seconds, names = sys.argv[1], sys.argv[2:] or [*TARGETS, *DIFFERENTIAL]
    failed = [name for name in names if not _holds(name, seconds)]
    print(f"failed: {', '.join(failed)}" if failed else f"all of {', '.join(names)} hold")
    return len(failed)


def _holds(name: str, seconds: str) -> bool:
    print(f"{name}: {seconds} s", flush=True)
    command = _differential(name, seconds) if name in DIFFERENTIAL else _guided(name, seconds)
    return subprocess.run(command, check=False).returncode == 0


def _differential(name: str, seconds: str) -> list[str | Path]:
    return [sys.executable, "-m", "tests.fuzz.differential", name, "--seconds", seconds, "--seed", str(int(time.time()))]


def _guided(name: str, seconds: str) -> list[str | Path]:
    new = FOUND / name
    new.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [
        FOLDER / "bin" / "python",
        CORPUS.parent / "run.py",
        name,
        f"-max_total_time={seconds}",
        f"-artifact_prefix={FOUND}/{name}-",
    ]
    return [*command, *_OPTIONS, new, CORPUS / name]


if __name__ == "__main__":
    sys.exit(main())
