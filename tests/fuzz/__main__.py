"""``python -m tests.fuzz SECONDS [TARGET …]``: run each target for SECONDS, beginning with the corpus of the repository.

Results are written to ``fuzz/found``: new inputs by target, and inputs that made one fail as ``TARGET-crash-…``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fuzz.install import FOLDER
from tests.fuzz.targets import CORPUS, TARGETS

FOUND = CORPUS.parent / "found"
_OPTIONS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1", "-verbosity=0")


def main() -> int:
    """The number of targets that failed."""
    seconds, names = sys.argv[1], sys.argv[2:] or list(TARGETS)
    failed = [name for name in names if not _holds(name, seconds)]
    print(f"failed: {', '.join(failed)}" if failed else f"all of {', '.join(names)} hold")
    return len(failed)


def _holds(name: str, seconds: str) -> bool:
    new = FOUND / name
    new.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {seconds} s", flush=True)
    command: list[str | Path] = [
        FOLDER / "bin" / "python",
        CORPUS.parent / "run.py",
        name,
        f"-max_total_time={seconds}",
        f"-artifact_prefix={FOUND}/{name}-",
    ]
    return subprocess.run([*command, *_OPTIONS, new, CORPUS / name], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
