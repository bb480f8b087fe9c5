"""``python -m tests.style [PATH…]``: check names, headings and phrases against ``vocabulary.py``.

With paths (files or folders), check these. Without, check the whole tree, and that every row of ``allowed.toml`` is needed, as
``make check`` does. ``--summary`` prints the number of findings by folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tests.style.scanning import Finding, findings

ROOT = Path(__file__).resolve().parent.parent.parent
ALLOWED_FILE = ROOT / "tests/style/allowed.toml"
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".service", ".tpl", ".lua", ".mjs", ".js", ".css", ".html")
FILES = ("Makefile", "Dockerfile")
PROGRAM = ("gateway", "upstream")
DOCSTRING_RULES = "D101,D103"


class Allowed(NamedTuple):
    """A row of ``allowed.toml``: where what is allowed, and why. An empty ``what`` skips the files."""

    what: str
    where: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        """Return whether the row allows a finding: by the word or phrase found, or by the identifier around it."""
        named = self.what.lower() in (finding.found.lower(), finding.within.strip("_").lower())
        return (named or not self.what) and fnmatch(finding.path, self.where)


def allowed() -> list[Allowed]:
    """Read ``allowed.toml``."""
    rows = tomllib.loads(ALLOWED_FILE.read_text())["allowed"]
    return [Allowed(row.get("what", ""), row.get("where", "*"), row["reason"]) for row in rows]


def paths(under: Sequence[str] = ()) -> Iterator[str]:
    """Yield the files of the project that have text to check, relative to its root; with ``under``, those in these files and folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *under]
    for path in sorted(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()):
        name = PurePosixPath(path)
        if (name.suffix in SUFFIXES or name.name.startswith(FILES)) and (ROOT / path).is_file():
            yield path


def in_docstrings(under: Sequence[str]) -> Iterator[Finding]:
    """Yield what ruff says of public docstrings of the program by the rules that ``pyproject.toml`` does not select yet."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--exit-zero", "--output-format=json", f"--select={DOCSTRING_RULES}"]
    existing = [path for path in under or PROGRAM if path.startswith(PROGRAM)]
    result = subprocess.run([*command, *existing], cwd=ROOT, capture_output=True, text=True, check=True) if existing else None
    for each in json.loads(result.stdout) if result else ():
        path = str(Path(each["filename"]).relative_to(ROOT))
        yield Finding(path, each["location"]["row"], "docstring", each["code"], "", each["message"])


def scan(path: str) -> list[Finding]:
    """Find everything in a file, allowed or not."""
    return findings(path, (ROOT / path).read_text())


def scan_all(under: Sequence[str] = ()) -> tuple[dict[str, list[Finding]], list[Allowed]]:
    """Find what is not allowed, by file, and the rows of ``allowed.toml`` that allowed nothing."""
    rows, found = allowed(), {}
    used: set[Allowed] = set()
    files = list(paths(under))
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1) if len(files) > 50 else 1) as pool:
        for path, each in zip(files, pool.map(scan, files, chunksize=8), strict=True):
            covering = [[row for row in rows if row.covers(finding)] for finding in each]
            used.update(row for some in covering for row in some)
            found[path] = [finding for finding, some in zip(each, covering, strict=True) if not some]
    for finding in in_docstrings(under):
        if not any(each.kind == "docstring" and each.line == finding.line for each in found[finding.path]):
            found[finding.path].append(finding)
    return found, [row for row in rows if row not in used]


def by_folder(counts: dict[str, int]) -> Counter[str]:
    """Sum up by folder, in the order of the numbers."""
    folders: Counter[str] = Counter()
    for path, number in counts.items():
        folders[str(PurePosixPath(path).parent)] += number
    return folders


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.style", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--summary", action="store_true", help="print the number of findings by folder")
    options = parser.parse_args()
    found, unused = scan_all(options.paths)
    counts = {path: len(each) for path, each in found.items()}
    total = sum(counts.values())
    if options.summary:
        for folder, number in by_folder(counts).most_common():
            print(f"{number:6} {folder}")
        print(f"{total:6} in all")
        return 0
    for findings_of_file in found.values():
        for finding in findings_of_file:
            print(finding)
    if not options.paths:
        for row in unused:
            print(f"allowed.toml: `{row.what}` in `{row.where}` is not needed; delete the row")
        print(f"vocabulary: {total} findings")
    return 1 if total or (unused and not options.paths) else 0


if __name__ == "__main__":
    sys.exit(main())
