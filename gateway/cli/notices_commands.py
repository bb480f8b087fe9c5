"""The commands ``vllm-gateway notices …``: list the last notices, and test their receivers. They send requests to a running gateway."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.admin_call import Where, call_gateway, with_gateway
from gateway.cli.output import FAILED, format_option, option, print_json, print_table

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient

_NOTICES = "/admin/v1/notices"
_COLUMNS = ("created", "notice", "event", "state", "attempts", "result", "text")


@with_gateway
def list_notices(
    where: Where,
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, max=1000, help="The maximum number of notices.")] = 100,
    form: Annotated[str, format_option("table", "json", text="table or json.")] = "table",
) -> int:
    """List the last notices, the newest first, with the state of their delivery."""

    def act(gateway: AdminClient) -> None:
        found = gateway.send("GET", _NOTICES, query={"limit": str(limit)})["notices"]
        if form == "json":
            print_json(found)
        else:
            unescaped = (one | {"text": html.unescape(one["text"])} for one in found)
            print_table(_COLUMNS, (("-" if one[name] is None else str(one[name]) for name in _COLUMNS) for one in unescaped))

    return call_gateway(where, act)


@with_gateway
def send_test(
    where: Where,
    name: Annotated[str | None, option("Only these notices; default: all.", "NAME")] = None,
) -> int:
    """Send a test notice, and print what the receiver replied."""
    results: list[dict[str, Any]] = []

    def act(gateway: AdminClient) -> None:
        query = "" if name is None else f"?name={quote(name, safe='')}"
        results.extend(gateway.send("POST", f"{_NOTICES}/test{query}")["results"])

    code = call_gateway(where, act)
    for each in results:
        reply = f": {each['reply']}" if each["reply"] else ""
        typer.echo(f"{each['name']}: {'accepted' if each['accepted'] else 'not accepted'}, {each['result']}{reply}")
    return code or (0 if all(each["accepted"] for each in results) else FAILED)


def commands() -> dict[str, Callable[..., int]]:
    """Return the commands by name."""
    return {"list": list_notices, "test": send_test}
