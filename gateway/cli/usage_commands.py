"""The commands ``vllm-gateway requests`` and ``vllm-gateway usage close``: single requests, and closed months.

The rule: a running gateway is asked first, because it also remembers requests without a valid key. Without one, single requests are read
from the ledger's database. Only a running gateway closes a month, so that its audit log has an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.admin_call import Where, connected, request, with_gateway
from gateway.cli.output import FAILED, console, format_option, option, say_error

CLOSE = "usage close"


@with_gateway
def requests(
    where: Where,
    identity: Annotated[
        str | None, typer.Argument(metavar="ID", help="The ID of one request: show its time line.", show_default=False)
    ] = None,
    key: Annotated[str | None, option("Only requests of this key.", "ID")] = None,
    team: Annotated[str | None, option("Only requests of this team.", "ID")] = None,
    user: Annotated[str | None, option("Only requests of this end user.", "NAME")] = None,
    model: Annotated[str | None, option("Only requests that this model served.", "ID")] = None,
    status: Annotated[str | None, option("Only this status (429), class (5xx), or errors, rejected or failed.", "STATUS")] = None,
    code: Annotated[str | None, option("Only this error code, e.g. insufficient_quota.", "CODE")] = None,
    reason: Annotated[str | None, option("Only this reason, e.g. tokens_per_day, idle_timeout, client.", "REASON")] = None,
    since: Annotated[str | None, option("From this date or time on, or for a duration (12h), as in `usage`; default: 7d.", "WHEN")] = None,
    until: Annotated[str | None, option("Until the beginning of this date, month or time; default: now.", "WHEN")] = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, max=1000, help="The maximum number of requests.")] = 20,
    cursor: Annotated[str | None, option("The next page: the cursor that the command printed.", "CURSOR")] = None,
    form: Annotated[str, format_option("table", "json", text="table or json.")] = "table",
) -> int:
    """List requests, or show what happened to a request.

    Shows the newest first, from the ledger. With an ID, it prints why the request failed and a time line.
    """
    from gateway.admin.client import UnreachableError
    from gateway.usage.requests.timeline import as_json, as_table, as_timeline, parse_page

    given = {
        "id": identity, "key": key, "team": team, "user": user, "model": model, "status": status, "code": code, "reason": reason,
        "since": since, "until": until, "cursor": cursor, "limit": str(limit),
    }  # fmt: skip
    parameters = {name: value for name, value in given.items() if value is not None}

    def show(page: Mapping[str, Any]) -> int:
        found, out = page["requests"], console()
        if form == "json":
            as_json(page, out)
        elif identity is not None and found:
            as_timeline(found[0], out)
        else:
            as_table(found, out)
        if page["next_cursor"] is not None and form == "table":
            say_error(f"there are more requests; continue with --cursor {page['next_cursor']}", 0)
        return say_error(f"no request has the ID {identity}", FAILED) if identity is not None and not found else 0

    if not where.is_elsewhere:
        try:
            with where.client() as gateway:
                gateway.status()
        except UnreachableError:
            return _from_database(where, parameters, show)
    with connected(where) as gateway:
        return show(parse_page(gateway.read("/admin/v1/requests", parameters)))


def _from_database(where: Where, parameters: Mapping[str, str], show: Callable[[Mapping[str, Any]], int]) -> int:
    """Show requests of the ledger's database, because no gateway runs."""
    from gateway.config import load
    from gateway.usage.requests.query import query_requests

    known = load(where.config)
    if known.ledger is None:
        return say_error(f"{where.config} has no ledger", FAILED)
    code = show(query_requests(known.ledger, where.folder, parameters).document())
    say_error("the gateway does not run, so requests without a valid key are not known", 0)
    return code


@with_gateway
def close(
    where: Where,
    month: Annotated[str, typer.Argument(metavar="MONTH", help="The month, e.g. 2026-10.", show_default=False)],
    cost_center: Annotated[str, typer.Option(metavar="LABEL", help="The label of keys that names the cost center.")] = "cost_center",
    form: Annotated[
        str, format_option("table", "csv", "html", "json", "lines", text="table, csv, html, json, or lines (what is hashed).")
    ] = "table",
) -> int:
    """Close a month: freeze the report of its usage, and print it.

    A closed month never changes: the command then prints it again. Requests that are recorded later are separate lines.
    """
    from gateway.usage.month_sheet import FORMATS

    found = request(where, "POST", f"/admin/v1/months/{quote(month, safe='')}/close")
    FORMATS[form](found, cost_center, console())
    if found["intact"]:
        return 0
    return say_error(f"the stored report of {month} was changed after it was closed: its hash differs", FAILED)
