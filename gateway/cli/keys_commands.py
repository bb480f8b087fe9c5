"""The commands ``vllm-gateway keys …``: create, change, replace, revoke and list keys, and import those of another gateway.

The rules: a key is printed once, when it is created, and is in no argument, file or other message. ``key_file`` writes the configuration's
files, and a running gateway reloads them by itself. Keys of the store are changed by a running gateway (``store_commands``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gateway.cli import store_commands
from gateway.cli.admin_call import Where, connected, with_config, with_gateway
from gateway.cli.output import BAD_USAGE, FAILED, BadUsageError, Command, option, print_json, print_table, say_error
from gateway.cli.store_commands import StoreOption, UnsetOption, means_store
from gateway.snapshot.key_properties import OPTIONS, KeyProperties

if TYPE_CHECKING:
    from rich.text import Text

    from gateway.admin.client import AdminClient
    from gateway.config import Config, Key
    from gateway.key_management.key_file import KeyFiles
    from gateway.key_management.key_list import LastUse
    from gateway.key_management.keys_import import ImportedKey

_ONCE = "This key is not stored and not shown again: save it now."
LabelOption = Annotated[list[str] | None, option("A label for its usage records; can be repeated.", "NAME=VALUE")]
Identity = Annotated[str, typer.Argument(metavar="ID", help="The ID of the key's entry.")]


def new(
    where: Where,
    id: Annotated[str, typer.Option("--id", help="The ID of the key's entry, e.g. team-a.")],
    expires: Annotated[str | None, option("The key expires on this date, e.g. 2027-01-01.", "DATE")] = None,
    models: Annotated[list[str] | None, option('A model that it may use, e.g. "Qwen/*"; can be repeated.', "GLOB")] = None,
    write: Annotated[bool, typer.Option("--write", help="Add it to gateway.yaml here.")] = False,
    name: Annotated[str | None, option("With the store: a name for people.", "TEXT")] = None,
    label: LabelOption = None,
    store: StoreOption = None,
    **further: Any,
) -> int:
    """Create a key.

    Prints the key once. With a store, the key is in force at once. Otherwise also prints the entry to add below `keys:` in the
    configuration, or adds it with --write or FILE.
    """
    from gateway.auth import keys
    from gateway.key_management.key_file import KeyFiles
    from gateway.key_management.yaml_edit import stanza

    properties = {name: further.pop(name) for name in OPTIONS}
    limited = {name: value for name, value in further.items() if value is not None}
    given = {"models": models or None, "expires": expires, "limits": limited or None, "labels": _labels(label) or None} | properties
    entry: dict[str, Any] = {"id": id} | {name: value for name, value in given.items() if value is not None}
    if wrong := _wrong(entry):
        return say_error(f"--{wrong}", BAD_USAGE)
    if _principal(entry).expired(datetime.now(UTC)):
        return say_error("--expires: the date is in the past", BAD_USAGE)
    if not write and means_store(where, store):
        return store_commands.create(where, entry | ({} if name is None else {"name": name}), _show_new)
    if name is not None:
        return say_error("--name is for keys of the store", BAD_USAGE)
    key = keys.mint(id)
    entry = {"id": id, "hash": keys.hash_of(key)} | entry
    if not write and where.named is None:
        typer.echo(f"{key}\n\n{stanza(entry, 2)}")
        typer.echo(_ONCE, err=True)
        return 0
    key_files = KeyFiles(where.config)
    if id in key_files.ids:
        return say_error(f"{id} exists already; `vllm-gateway keys rotate {id}` gives it a new key", FAILED)
    _show_new(key, f"{id} is in {key_files.add([entry])}")
    return 0


@with_gateway
def rotate(
    where: Where,
    id: Identity,
    overlap: Annotated[str, typer.Option(metavar="TIME", help="How long the former keys stay valid, e.g. 12h; 0s ends them now.")] = "7d",
    store: StoreOption = None,
) -> int:
    """Replace a key: create a new one, and let the former keys expire.

    Prints the new key once.
    """
    from gateway.auth import keys
    from gateway.config.quantities import parse_duration
    from gateway.key_management.key_file import KeyFiles
    from gateway.key_management.key_list import instant
    from gateway.key_management.rotation import former_hashes

    now = datetime.now(UTC)
    try:
        end = now + timedelta(seconds=parse_duration(overlap))
    except ValueError as error:
        return say_error(f"--overlap: {error}", BAD_USAGE)
    except OverflowError:
        return say_error("--overlap: the end is after the year 9999", BAD_USAGE)
    if means_store(where, store, id):
        return store_commands.rotate(where, id, overlap, _show_new)
    key, key_files = keys.mint(id), KeyFiles(where.config)
    entry = _principal(key_files.entry(id))
    if entry.revoked or entry.expired(now):
        return say_error(f"{id} {'is revoked' if entry.revoked else 'has expired'}, which would apply to its new key", FAILED)
    good = former_hashes(entry, end, now)
    changed = key_files.change(id, {"hash": [*good, keys.hash_of(key)]})
    last = min(max((one["expires"] for one in good), default=""), instant(entry.expires or end))
    until = f"; the former {'key is' if len(good) == 1 else 'keys are'} valid until {last}" if good else ""
    _show_new(key, f"{id} has a new key in {changed}{until}")
    return 0


@with_gateway
def revoke(where: Where, id: Identity, store: StoreOption = None) -> int:
    """Revoke all keys of an entry.

    The entry stays in the file with `revoked: true`, or in the store, so that its keys are rejected even if requests without a key are
    served.
    """
    from gateway.key_management.key_file import KeyFiles

    if means_store(where, store, id):
        return store_commands.operate(where, id, "revoke", "revoked")
    key_files = KeyFiles(where.config)
    entry = key_files.entry(id)
    if entry.get("anonymous") is True:
        return say_error(f"{id} is for requests without a key; remove it from the file to refuse them", FAILED)
    was_revoked = entry.get("revoked") is True
    typer.echo(f"{id} is already revoked" if was_revoked else f"{id} is revoked in {key_files.change(id, {'revoked': True})}")
    return 0


@with_gateway
def restore(where: Where, id: Identity, store: StoreOption = None) -> int:
    """Restore the keys of a revoked entry."""
    from gateway.key_management.key_file import KeyFiles

    if means_store(where, store, id):
        return store_commands.operate(where, id, "restore", "restored")
    key_files = KeyFiles(where.config)
    was_revoked = key_files.entry(id).get("revoked") is True
    typer.echo(f"{id} is restored in {key_files.change(id, {'revoked': False})}" if was_revoked else f"{id} is not revoked")
    return 0


def change(
    where: Where,
    id: Identity,
    expires: Annotated[str | None, option("The key expires on this date.", "DATE")] = None,
    models: Annotated[list[str] | None, option("A model that it may use; can be repeated.", "GLOB")] = None,
    name: Annotated[str | None, option("With the store: a name for people.", "TEXT")] = None,
    label: LabelOption = None,
    unset: UnsetOption = None,
    store: StoreOption = None,
    **further: Any,
) -> int:
    """Change the settings and limits of a key.

    Settings that are not named stay as they are.
    """
    from gateway.key_management.key_file import KeyFiles

    properties = {name: further.pop(name) for name in OPTIONS}
    removed = [each.replace("-", "_") for each in unset or ()]
    limits: dict[str, Any] = {each: value for each, value in further.items() if value is not None}
    limits |= {each: None for each in removed if each in further}
    given = {"name": name, "models": models or None, "expires": expires, "labels": _labels(label) or None, "limits": limits or None}
    patch = {each: value for each, value in (given | properties).items() if value is not None}
    patch |= {each: None for each in removed if each not in further}
    if not patch:
        return say_error("nothing to change; name a setting or a limit", BAD_USAGE)
    if means_store(where, store, id):
        return store_commands.change(where, store_commands.KEYS, id, patch)
    if "name" in patch:
        return say_error("--name is for keys of the store", BAD_USAGE)
    key_files = KeyFiles(where.config)
    typer.echo(f"{id} is changed in {key_files.change(id, _written_fields(key_files.entry(id), patch))}")
    return 0


def _written_fields(entry: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry in a file that a patch changes, with their values. A field that is removed gets its default."""
    from gateway.config import Key
    from gateway.store.entries import merged

    after, fields = merged(entry, patch), {}
    for name in patch:
        default = Key.model_fields[name].get_default(call_default_factory=True)
        fields[name] = after.get(name, list(default) if isinstance(default, tuple) else default)
    return fields


@with_gateway
def delete(where: Where, id: Identity, store: StoreOption = None) -> int:
    """Delete a key of the store. Its rows in the ledger stay."""
    from gateway.key_management.key_file import KeyFiles

    if not means_store(where, store, id):
        KeyFiles(where.config).entry(id)  # so that an unknown key, or a file that cannot be read, is reported as such
        return say_error(f"remove the entry of {id} from the file by hand, or revoke it", FAILED)
    return store_commands.delete(where, store_commands.KEYS, id)


@with_gateway
def show_one(where: Where, id: Identity, store: StoreOption = None) -> int:
    """Print a key as JSON, without its hashes."""
    from gateway.config import load
    from gateway.key_management.key_list import list_keys

    if means_store(where, store, id):
        return store_commands.show_one(where, store_commands.KEYS, id)
    known = load(where.config)
    listed = list_keys(known, _last_use(known, where), datetime.now(UTC))
    if (found := next((each for each in listed["keys"] if each["id"] == id), None)) is None:
        return say_error(f"there is no key {id} in {where.config}", FAILED)
    print_json(found)
    return 0


def _labels(given: Sequence[str] | None) -> dict[str, str]:
    """Return labels of the form name=value. Ends the command for another form."""
    found = {}
    for each in given or ():
        name, sign, value = each.partition("=")
        if not sign or not name or not value:
            raise BadUsageError(f"--label: expected NAME=VALUE, found {each!r}")
        found[name] = value
    return found


@with_gateway
def show(where: Where, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, store: StoreOption = None) -> None:
    """List the keys, what they may use, and which expire soon.

    Reads the configuration and the ledger, whether the gateway runs or not, or with --admin a gateway elsewhere. Keys of the store are
    read from a running gateway.
    """
    from gateway.config import load
    from gateway.key_management.key_list import list_keys

    if where.token_file is not None or means_store(where, store):
        with connected(where) as gateway:
            listed = _all_keys(gateway, store)
    else:
        known = load(where.config)
        listed = list_keys(known, _last_use(known, where), datetime.now(UTC))
    if as_json:
        print_json(listed["keys"])
        return
    print_table(("id", *OPTIONS, *_COLUMNS), map(_cells, listed["keys"]))
    if listed["last_use_unknown"]:
        typer.echo(f"the last use is unknown: {listed['last_use_unknown']}", err=True)


def _all_keys(gateway: AdminClient, store: bool | None) -> dict[str, Any]:
    """Return the keys of a gateway's files, and of its store if it has one. Raises RefusedError without the store that is required."""
    of_files = gateway.send("GET", "/keys")
    if store is False or (store is None and gateway.status()["store"] is None):
        return of_files
    stored, unknown = store_commands.entries(gateway, store_commands.KEYS, "keys")
    return {"keys": [*of_files["keys"], *stored], "last_use_unknown": of_files["last_use_unknown"] or unknown}


def _last_use(known: Config, where: Where) -> LastUse:
    """Return the last use of keys from the ledger, if one is configured."""
    from gateway.key_management.key_list import LastUse

    if known.ledger is None:
        return LastUse(unknown="no ledger is configured")
    from gateway.usage.key_activity import read_last_use  # with SQLAlchemy

    return read_last_use(known, where.folder)


@with_gateway
def take_over(
    where: Where,
    source: Annotated[Path, typer.Argument(metavar="KEYS", help="The keys: one per line, id,key per line, or LiteLLM's list as JSON.")],
    store: StoreOption = None,
) -> int:
    """Add the keys of another gateway to the configuration or to the store, as hashes.

    Clients keep their keys. Keys that the configuration already has are skipped.
    """
    from gateway.config.source import reason
    from gateway.key_management import keys_import
    from gateway.key_management.key_file import KeyFiles

    try:
        content = source.read_bytes()
        if means_store(where, store):
            return store_commands.take_over(where, source, content)
        found = keys_import.read_keys(content.decode("utf-8-sig"))
        key_files = KeyFiles(where.config)
        listed = keys_import.sort_keys(keys_import.without_unknown_teams(found, key_files.teams), key_files.hashes, key_files.ids)
    except (OSError, ValueError) as error:
        return say_error(f"{source} cannot be read: {reason(error) if isinstance(error, OSError) else 'it is not UTF-8 text'}", FAILED)
    except keys_import.BadLineError as error:
        return say_error(f"{source}: {error}", FAILED)
    changed = _add_all(key_files, listed.fresh, source) if listed.fresh else where.config
    for message in (*listed.again, *(f"{one.position}: left out: {', '.join(one.left_out)}" for one in listed.fresh if one.left_out)):
        say_error(f"{source}: {message}", 0)
    store_commands.print_added(len(listed.fresh), changed, listed.known)
    return 0


def _add_all(key_files: KeyFiles, fresh: Sequence[ImportedKey], file: Path) -> Path:
    """Add the keys of a file, and return the changed file. Problems name the position in the imported file."""
    from gateway.key_management.key_file import InvalidResultError

    for one in fresh:
        if wrong := _wrong(one.entry):
            raise typer.TyperException(f"{file}: {one.position}, {wrong}")
    try:
        return key_files.add([one.entry for one in fresh])
    except InvalidResultError as error:
        for problem in error.problems:
            if of_one := key_files.added_entry(problem):
                number, path = of_one
                raise typer.TyperException(f"{file}: {fresh[number].position}, {path}: {problem.message}") from error
        raise


def hash_of_key() -> int:
    """Read a key from stdin and print its hash for the configuration.

    Any text works as a key, but only keys of `keys new` are impossible to guess.
    """
    from gateway.auth.keys import hash_of

    typer.echo(hash_of(_read_key()))
    return 0


@with_config
def verify(where: Where) -> int:
    """Read a key from stdin and print the ID of its entry.

    Exits with 1 if the configuration does not have the key, or if it has expired.
    """
    from gateway.auth import keys
    from gateway.config import load

    known = load(where.config)
    token = _read_key()
    if (found := _holder(known, keys.hash_of(token))) is None:
        mistyped = keys.has_key_format(token) and not keys.has_valid_checksum(token)
        return say_error("the key is mistyped: its checksum is wrong" if mistyped else f"the key is not in {where.config}", FAILED)
    key, end = found
    if key.revoked:
        return say_error(f"{key.id}: revoked", FAILED)
    if end is not None and end <= datetime.now(UTC):
        return say_error(f"{key.id}: expired since {end.isoformat()}", FAILED)
    typer.echo(f"{key.id}: valid{f', until {end.isoformat()}' if end else ''}, for {', '.join(key.models)}")
    return 0


def _holder(config: Config, digest: str) -> tuple[Key, datetime | None] | None:
    """Return the entry with a hash, and the expiry of that key."""
    for key in config.keys:
        for one in key.hashes:
            if one.text == digest:
                return key, min((end for end in (key.expires, one.expires) if end is not None), default=None)
    return None


def _read_key() -> str:
    """Read one line from stdin, without echo on a terminal. The key is never read from the command line, which other users can see."""
    if sys.stdin.isatty():
        text: str = typer.prompt("Key", hide_input=True, err=True)
    else:
        try:
            text = sys.stdin.buffer.read(65_536).decode()
        except UnicodeDecodeError:
            raise BadUsageError("stdin is not UTF-8 text") from None
    token = text.strip("\r\n")
    if not token or "\n" in token:
        raise BadUsageError("expected one key, on one line, on stdin")
    return token


def _show_new(key: str, message: str) -> None:
    typer.echo(key)
    typer.echo(f"{message}\n{_ONCE}", err=True)


def _wrong(entry: Mapping[str, Any]) -> str | None:
    """Return the first problem of an entry, as ``name: message``."""
    from pydantic import ValidationError

    from gateway.config import Key
    from gateway.config.explain import findings

    try:
        Key.model_validate(entry)
    except ValidationError as error:
        finding = next(iter(findings(error, Key)))
        return f"{str(finding.path[-1] if finding.path[0] == 'limits' else finding.path[0]).replace('_', '-')}: {finding.message}"
    return None


def _principal(entry: Any) -> Key:
    from pydantic import ValidationError

    from gateway.config import Key

    try:
        return Key.model_validate(entry)
    except ValidationError as error:
        raise typer.TyperException(f"the entry of {entry.get('id')} is invalid; run `vllm-gateway check` for its problems") from error


# Output


_COLUMNS = ("state", "models", "expires", "last used", "hashes", "limits")


def _cells(one: Mapping[str, Any]) -> tuple[str | Text, ...]:
    """Return the cells of a key."""
    from rich.text import Text

    until = f" (until {', '.join(one['hashes_end'])})" if one["hashes_end"] else ""
    limits = ", ".join(_limit_texts(one["limits"]))
    hashes = f"{one['hashes']}{' and tokens' if one['tokens'] else ''}{until}"
    state = Text(one["state"], _COLORS.get(one["state"], ""))
    properties = ("-" if (value := one.get(name)) is None else str(value) for name in OPTIONS)
    return one["id"], *properties, state, ", ".join(one["models"]), one["expires"] or "-", one["last_used"] or "-", hashes, limits or "-"


def _limit_texts(limits: Mapping[str, Any]) -> Iterator[str]:
    """Yield each limit with its name; a budget has the name that its refusals have in metrics."""
    for name, value in limits.items():
        if name not in ("budgets", "session"):
            yield f"{name} {value}"
    budgets = [*limits.get("budgets", ()), *([{"window": "session", **limits["session"]}] if "session" in limits else [])]
    for each in budgets:
        soft = "soft " if each.get("soft") else ""
        yield from (f"{soft}{kind}_per_{each['window']} {each[kind]}" for kind in ("tokens", "cost") if each.get(kind) is not None)


_COLORS = {"ends soon": "bold yellow", "expired": "red", "revoked": "red"}


def commands() -> dict[str, Command]:
    """Return the commands by name."""
    return {
        "new": with_gateway(_with_derived_options(new)),
        "set": with_gateway(_with_derived_options(change)),
        "rotate": rotate,
        "revoke": revoke,
        "restore": restore,
        "list": show,
        "show": show_one,
        "delete": delete,
        **store_commands.raise_commands(store_commands.KEYS),
        "import": take_over,
        "hash": hash_of_key,
        "verify": verify,
    }


def team_commands() -> dict[str, Command]:
    """Return the commands for teams by name."""
    return {
        "new": with_gateway(_with_derived_options(store_commands.new_team, with_properties=False)),
        "set": with_gateway(_with_derived_options(store_commands.set_team, with_properties=False)),
        "list": store_commands.list_teams,
        "show": store_commands.show_team,
        "delete": store_commands.delete_team,
        **store_commands.raise_commands(store_commands.TEAMS),
    }


def _with_derived_options(command: Command, *, with_properties: bool = True) -> Command:
    """Return the command with an option for each property and each limit of a key instead of ``**further``."""
    from gateway.config import Limits

    @functools.wraps(command)
    def run(where: Where, **given: Any) -> int | None:
        return command(where, **given)

    types = get_type_hints(KeyProperties)
    options = [_option(name, types[name], **texts) for name, texts in OPTIONS.items() if with_properties]
    for name, field in Limits.model_fields.items():
        if name not in _NOT_AMOUNTS:
            kind, parse = (float, _amount) if name.startswith("cost_") else (int, _whole_number)
            options.append(_option(name, kind | None, "N", f"Limit: {field.description}.", parse))
    signature = inspect.signature(command, eval_str=True)
    plain = [parameter for parameter in signature.parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    run.__signature__ = signature.replace(parameters=[*plain, *options])  # type: ignore[attr-defined]
    return run


_NOT_AMOUNTS = ("models", "budgets", "session", "per_user")


def _option(name: str, kind: Any, metavar: str, help: str, parser: Callable[[str], Any] | None = None) -> inspect.Parameter:
    option = typer.Option(metavar=metavar, help=help, parser=parser)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _whole_number(text: str) -> int:
    """Return the number of an option. Raises BadParameter with a message that a person understands, unlike click's own."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected a whole number without a unit, e.g. 1000000, found {text!r}") from None


def _amount(text: str) -> float:
    """Return the amount of an option. Raises BadParameter, as ``_whole_number`` does."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number without a unit, e.g. 12.5, found {text!r}") from None
