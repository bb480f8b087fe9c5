"""The commands ``vllm-gateway notices …``: list the last notices, and test their receivers. They send requests to a running gateway."""

from __future__ import annotations

import html
from typing import Annotated

import typer

from gateway.cli.admin_call import Where, request, with_gateway
from gateway.cli.output import FAILED, Command, format_option, option, print_json, print_table

_NOTICES = "/admin/v1/notices"
_COLUMNS = ("created", "notice", "event", "state", "attempts", "result", "text")


@with_gateway
def list_notices(
    where: Where,
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, max=1000, help="The maximum number of notices.")] = 100,
    form: Annotated[str, format_option("table", "json", text="table or json.")] = "table",
) -> None:
    """List the last notices, the newest first, with the state of their delivery."""
    found = request(where, "GET", _NOTICES, {"limit": str(limit)})["notices"]
    if form == "json":
        print_json(found)
    else:
        unescaped = (one | {"text": html.unescape(one["text"])} for one in found)
        print_table(_COLUMNS, (("-" if one[name] is None else str(one[name]) for name in _COLUMNS) for one in unescaped))


@with_gateway
def send_test(where: Where, name: Annotated[str | None, option("Only these notices; default: all.", "NAME")] = None) -> int:
    """Send a test notice, and print what the receiver replied."""
    results = request(where, "POST", f"{_NOTICES}/test", None if name is None else {"name": name})["results"]
    for each in results:
        reply = f": {each['reply']}" if each["reply"] else ""
        typer.echo(f"{each['name']}: {'accepted' if each['accepted'] else 'not accepted'}, {each['result']}{reply}")
    return 0 if all(each["accepted"] for each in results) else FAILED


def commands() -> dict[str, Command]:
    """Return the commands by name."""
    return {"list": list_notices, "test": send_test}
