"""The commands ``vllm-gateway people …``: the people who have signed in to a running gateway.

The rule: names come from identity providers, so control characters never reach a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gateway.cli.admin_call import Where, connected, with_gateway
from gateway.cli.output import FAILED, Command, option, print_json, print_table, say_error
from gateway.cli.store_commands import entries

PEOPLE = "/admin/v1/people"
Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject of the person, as `people list` shows it.")]
_COLUMNS = ("subject", "issuer", "name", "role", "teams", "owned_teams", "sessions", "last_sign_in")


@with_gateway
def list_people(where: Where, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the people who have signed in, as their last sign-in described them."""
    with connected(where) as gateway:
        found = entries(gateway, PEOPLE, "people")[0]
    if as_json:
        print_json(found)
    else:
        print_table(_COLUMNS, ((_cell(one[name]) for name in _COLUMNS) for one in found))


@with_gateway
def sign_out(
    where: Where,
    subject: Subject,
    issuer: Annotated[str | None, option('The issuer, if several have this subject; "" for sign-in links.', "URL")] = None,
) -> int:
    """End all sessions of a person, on both ports and on all gateways.

    The person can sign in again. To prevent that, remove the person's access at the identity provider.
    """
    with connected(where) as gateway:
        found = [each for each in entries(gateway, PEOPLE, "people", {"subject": subject})[0] if issuer in (None, each["issuer"])]
        if len(found) != 1:
            several = f"several issuers have the subject {subject}; name one with --issuer: {', '.join(each['issuer'] for each in found)}"
            return say_error(several if found else f"no person {subject} has signed in", FAILED)
        ended = gateway.send("DELETE", f"{PEOPLE}/{found[0]['id']}/sessions")["ended"]
    typer.echo(f"{ended} {'session' if ended == 1 else 'sessions'} of {subject} ended")
    return 0


def _cell(value: Any) -> str:
    text = ", ".join(value) if isinstance(value, list) else str(value or "-")
    return "".join(each if each.isprintable() else "?" for each in text)


def commands() -> Mapping[str, Command]:
    """Return the commands by name."""
    return {"list": list_people, "sign-out": sign_out}
