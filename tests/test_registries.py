"""Every registry is followed completely: the test for each kind names the location with a missing entry.

The kinds are those of docs/development.md, "Extension points". The first place of each is the registry; it decides what exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import yaml

from docs.reference import groups
from gateway.api.errors import ERRORS
from gateway.api.reference.shapes import read
from gateway.api.routes import ROUTES
from gateway.config import schema
from gateway.limits.decision import RATES
from gateway.snapshot.snapshot import CALENDAR, Limits
from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.documents.blocks import DOCS, ROOT
from upstream.balancing.policies import POLICIES


class Location(NamedTuple):
    """A file that must have every name of a registry, the names that it has, and what to do about a missing one."""

    file: str
    names: Callable[[], Iterable[str]]
    task: str


class Kind(NamedTuple):
    """A registry and the places that follow it. ``names`` are those of the registry."""

    registry: str
    names: Iterable[str]
    locations: tuple[Location, ...]


def first_cells(page: str) -> set[str]:
    """Return everything between backticks in the first three cells of a page's tables, and bare cells."""
    rows = re.findall(r"^\| (.+) \|$", (ROOT / page).read_text(), re.MULTILINE)
    cells = [cell for row in rows for cell in row.split(" | ")[:3]]
    return {name for cell in cells for name in (*re.findall(r"`([^`]+)`", cell), cell.strip("`"))}


def described(file: str) -> Callable[[], set[str]]:
    """Return a reader of the names in a page's tables."""
    return lambda: first_cells(file)


def chart_settings() -> set[str]:
    """Return the names of every setting in the schema of the chart's values."""
    shapes = [yaml.safe_load((ROOT / "deploy/helm/vllm-gateway/values.schema.json").read_text())]
    found: set[str] = set()
    while shapes:
        shape = shapes.pop()
        if isinstance(shape, dict):
            found |= set(shape.get("properties", {}))
            shapes += shape.values()
        elif isinstance(shape, list):
            shapes += shape
    return found


def modules(folder: str, prefix: str = "") -> Callable[[], set[str]]:
    """Return a reader of the modules in a folder whose names start with ``prefix``, without it."""
    return lambda: {path.stem.removeprefix(prefix) for path in (ROOT / folder).glob(f"{prefix}*.py")}


def documented_policies() -> set[str]:
    """Return the names in the table of balance policies."""
    section = (DOCS / "configuration.md").read_text().partition("\n## Balance policies\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


SETTINGS = {setting.name for group in groups() for setting in group.settings}
KINDS = {
    "error code": Kind(
        "gateway/api/errors.py, ERRORS",
        ERRORS,
        (
            Location("docs/errors.md", described("docs/errors.md"), "add a row for clients"),
            Location("docs/operators/errors-by-code.md", described("docs/operators/errors-by-code.md"), "add a row for operators"),
        ),
    ),
    "metric": Kind(
        "gateway/telemetry/metrics.py, FAMILIES",
        [PREFIX + name for name in FAMILIES],
        (Location("docs/metrics.md", described("docs/metrics.md"), "add a row"),),
    ),
    "route": Kind(
        "gateway/api/routes.py, ROUTES",
        ROUTES,
        (
            Location("gateway/api/reference", lambda: read().routes, "add an entry with the shapes of its bodies"),
            Location("docs/routes.md", described("docs/routes.md"), "add a row"),
            Location(
                "docs/api.md", lambda: re.findall(r"POST (/\S+?)`?$", (DOCS / "api.md").read_text(), re.MULTILINE), "run docs/reference.py"
            ),
        ),
    ),
    "setting": Kind(
        "gateway/config/models.py",
        SETTINGS,
        (
            Location("docs/configuration.md", described("docs/configuration.md"), "run docs/reference.py"),
            Location("deploy/helm/vllm-gateway/values.schema.json", chart_settings, "run deploy/helm/sync.py"),
        ),
    ),
    "limit": Kind(
        "gateway/limits/decision.py, RATES",
        (*RATES, *(f"{kind}_per_{window}" for kind in ("tokens", "cost") for window in CALENDAR)),
        (
            Location("gateway/snapshot/snapshot.py, Limits", lambda: Limits.__annotations__, "add a field"),
            Location("gateway/config/models.py, _Amounts", lambda: schema()["$defs"]["Limits"]["properties"], "add a setting"),
            Location("docs/limits.md", described("docs/limits.md"), "add a row"),
        ),
    ),
    "balance policy": Kind(
        "upstream/balancing/policies/__init__.py, POLICIES",
        POLICIES,
        (
            Location("upstream/balancing/policies", modules("upstream/balancing/policies"), "add a module of this name"),
            Location("tests/upstream/balancing/policies", modules("tests/upstream/balancing/policies", "test_"), "add its test"),
            Location("docs/configuration.md, Balance policies", documented_policies, "run docs/reference.py"),
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_place_is_forgotten(kind: str) -> None:
    registry, names, locations = KINDS[kind]
    assert names
    missing = [
        f"{kind} `{name}` of {registry} is missing in {location.file}: {location.task}"
        for location in locations
        for name in {*names} - {*location.names()}
    ]
    assert not missing, "\n".join(sorted(missing))


def test_the_named_files_exist() -> None:
    named = [name.partition(",")[0] for kind in KINDS.values() for name in (kind.registry, *(location.file for location in kind.locations))]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_page_for_contributors_shows_every_kind() -> None:
    section = (DOCS / "development.md").read_text().partition("## Extension points")[2].partition("\n## ")[0]
    assert [kind for kind in KINDS if kind.split()[0] not in section.lower()] == []
