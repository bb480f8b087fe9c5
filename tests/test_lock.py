"""Installed packages are the locked ones: by their hashes, and under a permitted license."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.rows import each_row

ROOT = Path(__file__).resolve().parent.parent
LOCKED = ("tests", "docs", "deploy")
LOCKS = [ROOT / "requirements.lock", *sorted(file for folder in LOCKED for file in (ROOT / folder).rglob("*.lock"))]
_ENTRY = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
_PERMITTED = re.compile(r"\b(MIT|ISC|PSF-2\.0|MPL-2\.0|Mozilla Public License 2\.0|Apache|BSD|LGPL-3\.0-only)\b")
_FORBIDDEN = re.compile(r"(?<!L)\b(AGPL|GPL|SSPL|BUSL|Commons Clause|Proprietary)", re.IGNORECASE)


def entries(lock: Path) -> list[tuple[str, str]]:
    """The packages of a lock, each with the rest of its entry."""
    text = "".join(line for line in lock.read_text().splitlines(keepends=True) if not line.lstrip().startswith(("#", "--index", "--extra")))
    return [(match[1], match[2]) for match in _ENTRY.finditer(text)]


@each_row("lock", LOCKS, ids=lambda lock: str(lock.relative_to(ROOT)))
def test_every_locked_package_has_one_version_and_its_hashes(lock: Path) -> None:
    found = entries(lock)
    assert found
    for name, rest in found:
        assert re.match(r"==[^\s;]+|\s*@ ", rest), f"{name} has no exact version"
        assert _HASH.search(rest), f"{name} has no hash"


@pytest.mark.parametrize("lock", sorted((ROOT / "deploy").rglob("*.lock")), ids=lambda lock: lock.name)
def test_what_is_deployed_is_what_was_tried(lock: Path) -> None:
    tried = dict(entries(ROOT / "requirements.lock"))
    assert {name: rest for name, rest in entries(lock) if tried.get(name) != rest} == {}, "run `make lock`"


def licenses(name: str) -> str:
    """Return the license in a distribution's metadata: its expression, its field, or its classifiers."""
    fields = metadata.metadata(name).json
    classifiers = [each.split("::")[-1].strip() for each in fields.get("classifier", ()) if each.startswith("License ::")]
    return str(fields.get("license_expression") or "; ".join(classifiers) or fields.get("license", ""))


def test_every_installed_package_has_a_permitted_license() -> None:
    installed = {name for name, _ in entries(ROOT / "requirements.lock")} & {
        each.name.lower().replace("_", "-").replace(".", "-") for each in metadata.distributions()
    }
    assert len(installed) > 40
    wrong = {name: text for name in installed if not _PERMITTED.search(text := licenses(name)) or _FORBIDDEN.search(text)}
    assert wrong == {}


@pytest.mark.parametrize("text", ["GPL-3.0-only", "AGPL-3.0", "Proprietary", "", "Other", "MIT AND GPL-2.0"])
def test_others_are_not(text: str) -> None:
    assert not _PERMITTED.search(text) or _FORBIDDEN.search(text)
