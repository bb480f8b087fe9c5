"""The commands for keys and teams of the store. They send requests to a running gateway, which changes the store's database.

The rules: new keys of a configuration with a store are added to the store, unless ``--no-store`` says that the files are meant. An ID
belongs to the files or to the store and never to both, so a command that names an existing key needs no option.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.admin_call import Where, connected, request, with_gateway
from gateway.cli.output import BAD_USAGE, Command, option, print_json, say_error

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient

KEYS, TEAMS = "/admin/v1/keys", "/admin/v1/teams"
_ANY_VERSION = {"if-match": "*"}
_PAGE = "1000"
StoreOption = Annotated[
    bool | None, typer.Option("--store/--no-store", help="Use the store, or the files; default: the store if one is configured.")
]
UnsetOption = Annotated[list[str] | None, option("A setting or limit to remove; can be repeated.", "NAME")]
WeightOption = Annotated[float | None, option("Share of the team in queues, e.g. 3; 1 by default.", "NUMBER")]
SelfServiceOption = Annotated[
    str | None, option('Keys that its people may create, e.g. \'{"max_keys": 5, "max_lifetime": "90d"}\'.', "JSON", "--self-service")
]
Identity = Annotated[str, typer.Argument(metavar="ID", help="The ID of the team.")]


def has_store(config: Path) -> bool:
    """Return whether a configuration has a store. A file that cannot be read has none here; the command reports that later."""
    from gateway.config import drafted

    draft = drafted(config)
    return draft is not None and draft.top.get("store").value is not None


def means_store(where: Where, store: bool | None, identity: str | None = None) -> bool:
    """Return whether a command means the store: as it says, or by its configuration. ``identity``: the existing key that it names."""
    if store is not None or where.admin is not None:
        return store is not False
    if not has_store(where.config):
        return False
    return identity is None or identity not in _ids_of_files(where.config)


def _ids_of_files(config: Path) -> frozenset[str]:
    from gateway.key_management.key_file import KeyFileError, KeyFiles

    try:
        return KeyFiles(config).ids
    except KeyFileError:
        return frozenset()


# Keys


def create(where: Where, fields: Mapping[str, Any], show: Callable[[str, str], None]) -> int:
    """Create a key of the store, and show it."""
    made = request(where, "POST", KEYS, json=fields)
    show(made["secret"], f"{made['id']} is in the store")
    return 0


def rotate(where: Where, identity: str, overlap: str, show: Callable[[str, str], None]) -> int:
    """Create another key for an entry of the store, and show it."""
    made = request(where, "POST", f"{_path(KEYS, identity)}/rotate", json={"overlap": overlap}, headers=_ANY_VERSION)
    until = f"; former keys are valid until {max(made['hashes_end'])}" if made["hashes_end"] else ""
    show(made["secret"], f"{identity} has a new key in the store{until}")
    return 0


def operate(where: Where, identity: str, operation: str, done: str) -> int:
    """Revoke or restore a key of the store. ``done`` says what it is afterwards."""
    return _send(where, "POST", f"{_path(KEYS, identity)}/{operation}", {}, f"{identity} is {done} in the store")


def change(where: Where, path: str, identity: str, patch: Mapping[str, Any]) -> int:
    """Change a key or a team of the store."""
    return _send(where, "PATCH", _path(path, identity), patch, f"{identity} is changed in the store")


def delete(where: Where, path: str, identity: str) -> int:
    """Delete a key or a team of the store."""
    return _send(where, "DELETE", _path(path, identity), None, f"{identity} is deleted from the store")


def show_one(where: Where, path: str, identity: str) -> int:
    """Print a key or a team of the store as JSON."""
    print_json(request(where, "GET", _path(path, identity)))
    return 0


def take_over(where: Where, source: Path, text: bytes) -> int:
    """Add the keys of another gateway to the store."""
    done = request(where, "POST", f"{KEYS}/import", content=text)
    for message in done["messages"]:
        say_error(f"{source}: {message}", 0)
    print_added(len(done["added"]), "the store", done["known"])
    return 0


def print_added(added: int, target: object, known: int) -> None:
    """Print how many keys were added to a file or the store, and how many were there before."""
    also = f"; {known} {'was' if known == 1 else 'were'} already known" if known else ""
    typer.echo(f"{added} {'key' if added == 1 else 'keys'} added to {target}{also}")


def entries(gateway: AdminClient, path: str, name: str, wanted: Mapping[str, str] | None = None) -> tuple[list[dict[str, Any]], str | None]:
    """Return all keys or teams of the store, or all people, that a query wants, and why the last use is unknown."""
    found: list[dict[str, Any]] = []
    query, unknown = {"limit": _PAGE, **(wanted or {})}, None
    while True:
        page = gateway.send("GET", path, query)
        found += page[name]
        unknown = page.get("last_use_unknown")
        if page["next_cursor"] is None:
            return found, unknown
        query = {**query, "cursor": page["next_cursor"]}


def _send(where: Where, method: str, path: str, body: Any, done: str) -> int:
    """Change any version of an entry, and print what was done."""
    request(where, method, path, json=body, headers=_ANY_VERSION)
    typer.echo(done)
    return 0


def _path(path: str, identity: str) -> str:
    return f"{path}/{quote(identity, safe='')}"


# Raises

Limit = Annotated[str, typer.Argument(metavar="LIMIT", help="The limit, e.g. tokens_per_day.")]
To = Annotated[str, typer.Argument(metavar="TO", help="A factor such as 2x, or an amount.")]
Until = Annotated[
    str,
    typer.Option(
        metavar="WHEN", help="The end: a time of day in UTC such as 18:00, a time such as 2027-01-31T18:00:00Z, or a duration such as 2h."
    ),
]
OneLimit = Annotated[str | None, option("Only this limit; default: all.", "LIMIT", "--limit")]
Entry = Annotated[str, typer.Argument(metavar="ID", help="The ID of the key or team.")]


def raise_commands(path: str) -> dict[str, Command]:
    """Return the commands for raises of keys or of teams, by name."""

    @with_gateway
    def add(where: Where, id: Entry, limit: Limit, to: To, until: Until) -> None:
        """Raise a limit until a time, also of a key or team in the files. It ends by itself."""
        made = request(where, "POST", f"{_path(path, id)}/raises", json={"limit": limit, "to": to, "until": until})
        typer.echo(_raised(id, next(each for each in made["raises"] if each["limit"] == limit)))

    @with_gateway
    def end(where: Where, id: Entry, limit: OneLimit = None) -> None:
        """End raises before their time."""
        request(where, "DELETE", f"{_path(path, id)}/raises", None if limit is None else {"limit": limit})
        typer.echo(f"{id}: {limit or 'all limits'} as configured again")

    @with_gateway
    def show(where: Where, id: Entry) -> None:
        """Print the limits that are raised at the moment."""
        for each in request(where, "GET", f"{_path(path, id)}/raises")["raises"]:
            typer.echo(f"{_raised(id, each)}, by {each['by']}")

    return {"raise": add, "end-raise": end, "raises": show}


def _raised(identity: str, one: Mapping[str, Any]) -> str:
    return f"{identity}: {one['limit']} is raised to {one['to']} until {one['until']}"


# Teams


def new_team(
    where: Where,
    id: Annotated[str, typer.Option("--id", help="The ID of the team.")],
    weight: WeightOption = None,
    self_service: SelfServiceOption = None,
    **limits: Any,
) -> None:
    """Create a team in the store."""
    fields = {"id": id, "limits": {name: value for name, value in limits.items() if value is not None}, **_settings(weight, self_service)}
    request(where, "POST", TEAMS, json=fields)
    typer.echo(f"{id} is in the store")


def set_team(
    where: Where,
    id: Identity,
    unset: Annotated[list[str] | None, option("Remove this limit, or weight or self-service; can be repeated.", "NAME")] = None,
    weight: WeightOption = None,
    self_service: SelfServiceOption = None,
    **limits: Any,
) -> int:
    """Change the limits of a team of the store, its share in queues, and the keys that its people may create."""
    removed: dict[str, None] = dict.fromkeys(name.replace("-", "_") for name in unset or ())
    settings = _settings(weight, self_service) | {name: removed.pop(name) for name in ("weight", "self_service") if name in removed}
    changed = {name: value for name, value in limits.items() if value is not None} | removed
    if not changed and not settings:
        return say_error("nothing to change; name a limit, --weight or --self-service", BAD_USAGE)
    return change(where, TEAMS, id, settings | ({"limits": changed} if changed else {}))


def _settings(weight: float | None, policy: str | None) -> dict[str, Any]:
    """Return the options of a team as fields of a request. Raises BadParameter."""
    fields: dict[str, Any] = {} if weight is None else {"weight": weight}
    if policy is None:
        return fields
    try:
        return fields | {"self_service": json.loads(policy)}
    except ValueError:
        raise typer.BadParameter("--self-service: expected JSON") from None


@with_gateway
def list_teams(where: Where) -> None:
    """Print the teams of the store as JSON."""
    with connected(where) as gateway:
        print_json(entries(gateway, TEAMS, "teams")[0])


@with_gateway
def show_team(where: Where, id: Identity) -> int:
    """Print a team of the store as JSON."""
    return show_one(where, TEAMS, id)


@with_gateway
def delete_team(where: Where, id: Identity) -> int:
    """Delete a team without keys from the store."""
    return delete(where, TEAMS, id)
