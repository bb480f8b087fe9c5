"""The pages about the attacks, made from the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.attacks.table import ATTACKS, Attack

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_OF_SIGN_IN = """\
# Attacks on the sign-in

This page lets you check which attacks on the [sign-in](sign-in.md) the project tries against itself.

Each row is a test that fails if the attack works. `python -m tests.attacks` writes this page, and `python -m tests.attacks run` runs the
{count} attacks of this page and of [Attacks on access](attacks-access.md). They use real sockets, and an identity provider that is hostile
in every step. Independent tests sign in with the npm package `oidc-provider`."""
_OF_ACCESS = """\
# Attacks on access

This page lets you check which attacks on [roles](roles.md), [keys](keys-at-run-time.md) and the [audit log](audit.md) the project tries
against itself.

Each row is a test that fails if the attack works. Routes come from the tables of the applications, so that a new route is attacked as
well. [Attacks on the sign-in](attacks.md) has the other rows."""
_PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "attacks.md": (
            _OF_SIGN_IN,
            (
                "Responses of identity providers",
                "ID tokens",
                "Hostile identity providers",
                "Redirects",
                "Sessions and logout",
                "Back-channel logout",
                "Sign-in links",
            ),
        ),
        "attacks-access.md": (_OF_ACCESS, ("Other sites", "Privileges", "Guesses", "Keys made at run time", "Self-service", "Audit log")),
    }
)
"""The introduction and the areas of each page."""


def rendered() -> dict[str, str]:
    """Return the pages by the names of their files."""
    assert {area for _, areas in _PAGES.values() for area in areas} == ATTACKS.keys(), "each area is on a page"
    count = sum(map(len, ATTACKS.values()))
    return {
        name: "\n".join([introduction.format(count=count), *(line for area in areas for line in _section(area))]) + "\n"
        for name, (introduction, areas) in _PAGES.items()
    }


def _section(area: str) -> Iterator[str]:
    yield from ("", f"## {area}", "", "| attack | the attacker | result |", "|---|---|---|")
    yield from (_row(attack) for attack in ATTACKS[area])


def _row(attack: Attack) -> str:
    file = f"../{attack.test.__module__.replace('.', '/')}.py"
    return f"| [{attack.name}]({file}) | {attack.attempt} | {attack.expected} |"
