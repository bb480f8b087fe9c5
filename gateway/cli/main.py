"""The command ``vllm-gateway``.

Owns arguments, output and exit codes: 0 for success, 1 for a failure, 2 for an invalid command line or configuration. The rule: an error is
one line on stderr, never a traceback. Commands import what they need when they run, so that the program starts fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from typer.core import TyperCommand, TyperGroup

from gateway import __version__
from gateway.cli import audit_commands, keys_commands, notices_commands, people_commands, record_commands, usage_commands
from gateway.cli.admin_call import Where, connected, request, with_config, with_gateway
from gateway.cli.output import BAD_USAGE, FAILED, NAME, Command, console, format_option, option, print_json, print_problem, say_error
from gateway.system.compiled_core import core
from gateway.usage.dimensions import CHOICES

if TYPE_CHECKING:
    from gateway.config import Config, Problem
    from gateway.config.source import Source

_HELP = """One URL and one key in front of your vLLM servers.

`vllm-gateway demo` shows it at work; otherwise write a gateway.yaml, `check` it and `serve` it."""

Server = Annotated[str, typer.Argument(metavar="SERVER", help="The name of the server in `status`.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The ID of the model.")]


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. The outer edge: every error becomes one line on stderr."""
    try:
        app = application(with_keys=arguments[:1] in (["keys"], ["teams"]))
        outcome = app(list(arguments) or ["--help"], prog_name=NAME, standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except typer.TyperException as error:
        return say_error(error.format_message(), error.exit_code)
    except typer.Abort:
        return say_error("aborted", FAILED)
    except BrokenPipeError:
        sys.stdout = None  # the reader has exited, so nothing is flushed at exit
        return FAILED
    except Exception as error:  # noqa: BLE001
        return _reported(error)


def _reported(error: Exception) -> int:
    """Print an error of a command, and return the exit code. Only here it is imported what the error may be."""
    from gateway.config import ConfigurationError
    from gateway.key_management.key_file import InvalidResultError, KeyFileError
    from gateway.ledger.errors import DatabaseUnavailableError
    from gateway.recording.reading import RecordError
    from gateway.usage.errors import QueryError

    match error:
        case ConfigurationError() | InvalidResultError():
            for problem in error.problems:
                print_problem(problem, "red", err=True)
            return BAD_USAGE
        case KeyFileError() | RecordError():
            return say_error(str(error), FAILED)
        case QueryError():
            return say_error(str(error), BAD_USAGE)
        case DatabaseUnavailableError():
            return say_error(f"the ledger's database does not respond: {error}", FAILED)
    return say_error(f"{type(error).__name__}: {error}", FAILED)


def application(*, with_keys: bool) -> typer.Typer:
    """Build the command line. The commands below ``keys`` and ``teams`` must import the settings, so they are added only if needed."""
    app = typer.Typer(cls=_Commands, help=_HELP, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_root)
    for name, command in _COMMANDS.items():
        app.command(name)(command)
    app.command(cls=_Untouched, add_help_option=False)(simulate)
    groups = {
        "keys": ("Create, change, replace, revoke and list keys.", keys_commands.commands, with_keys),
        "teams": ("Create, change and list the teams of the store.", keys_commands.team_commands, with_keys),
        "people": ("List the people who have signed in, and sign them out.", people_commands.commands, True),
        "audit": ("List and verify the audit log.", audit_commands.commands, True),
        "record": ("Show recorded requests.", record_commands.commands, True),
        "notices": ("List notices, and test their receivers.", notices_commands.commands, True),
    }
    for group, (text, commands, shown) in groups.items():
        made = typer.Typer(help=text, rich_markup_mode=None)
        for name, command in commands().items() if shown else ():
            made.command(name)(command)
        app.add_typer(made, name=group)
    return app


class _Commands(TyperGroup):
    """The commands. ``usage close`` is a separate one, because ``usage`` itself takes a FILE."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        is_close = " ".join(args[:2]) == usage_commands.CLOSE
        return super().resolve_command(ctx, [usage_commands.CLOSE, *args[2:]] if is_close else args)


class _Untouched(TyperCommand):
    """A command that passes all its arguments to another program, including ``--`` and ``--help``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{NAME} {__version__} ({core()} core)")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    pass


@with_config
def serve(where: Where) -> int:
    """Run the gateway until SIGTERM or Ctrl-C."""
    from gateway.control.serve import StartError
    from gateway.control.serve import serve as control

    try:
        return control(where.config)
    except StartError as error:
        return say_error(str(error), FAILED)


def demo(
    traffic: Annotated[
        bool, typer.Option("--traffic/--no-traffic", help="Send a few requests a minute, so that the pages show something.")
    ] = True,
) -> int:
    """Run the gateway with simulated models.

    Prints the addresses of the portal and the console, and a curl command.
    """
    from gateway.cli.demo import run as run_demo

    return run_demo(traffic=traffic)


def simulate(context: typer.Context) -> int:
    """Run a stand-in for a vLLM server.

    All arguments are the simulator's: `vllm-gateway simulate --help` lists them.
    """
    from upstream.simulator import main as simulator

    return simulator(context.args, f"{NAME} simulate")


@with_config
def check(where: Where) -> int:
    """Check a configuration.

    Prints one line for each problem, `file:line: path: message`, and one with `note:` for what is valid and probably a mistake: a
    key that has expired, a cost without a limit, a budget that a restart resets. Reads secrets as `serve` does, and compares
    launches with this machine: vLLM's options, GPUs, files. Exits with 2 if there are problems.
    """
    from gateway.config import ConfigurationError, Note, load
    from gateway.config.problems import in_order
    from gateway.config.source import read

    checked = where.config
    once = {Path(os.path.abspath(checked)): read(checked)}  # a pipe can be read only once
    known, found = None, _preflight(checked, once)
    try:
        known = load(checked, instead=once)
    except ConfigurationError as error:
        found += error.problems
    for problem in in_order(found, str(checked)):
        print_problem(problem, "yellow" if isinstance(problem, Note) else "red")
    if known is None or not all(isinstance(problem, Note) for problem in found):
        return BAD_USAGE
    typer.echo(f"{checked} is valid: {_counted(known, len(found))}")
    return 0


def _preflight(file: Path, once: Mapping[Path, Source]) -> list[Problem]:
    """Return the problems of launches on this machine, and notes."""
    from gateway.check import lint, preflight
    from gateway.check.launch_check import this_machine
    from gateway.config import drafted
    from upstream.vllm.command_line import inherited

    if (draft := drafted(file, once)) is None:
        return []
    machine = this_machine(draft, inherited(os.environ, Path(sys.executable).parent), lambda text: typer.echo(text, err=True))
    return [*preflight.problems(draft, machine), *lint.notes(draft, datetime.now(UTC))]


def schema() -> int:
    """Print the configuration's JSON Schema, for editors."""
    from gateway.config import schema as json_schema

    print_json(json_schema())
    return 0


@with_gateway
def status(where: Where, as_json: Annotated[bool, typer.Option("--json", help="Print /status as JSON.")] = False) -> None:
    """Show the state of the running gateway and of its models."""
    from gateway.admin.status_terminal import show
    from gateway.admin.status_view import status_view

    with connected(where) as gateway:
        known = gateway.status()
    if as_json:
        print_json(known)
    else:
        show(status_view(known), console())


@with_gateway
def usage(
    where: Where,
    by: Annotated[str, typer.Option(metavar="WHAT", help=f"What to group by, separated by commas: {', '.join(CHOICES)}.")] = "key,model",
    since: Annotated[
        str,
        typer.Option(
            metavar="WHEN", help="Count from 2027-01-31, 2027-01, 2027-01-31T12:00, today, yesterday, this-month, or for a duration (12h)."
        ),
    ] = "30d",
    until: Annotated[str | None, option("Count to the beginning of this date, month or time; default: now.", "WHEN")] = None,
    key: Annotated[str | None, option("Only this key, with the subjects of its tokens.", "ID")] = None,
    team: Annotated[str | None, option("Only this team.", "ID")] = None,
    model: Annotated[str | None, option("Only this model.", "ID")] = None,
    reconcile: Annotated[
        bool, typer.Option("--reconcile", help="Compare with the servers' own token counters, by model and server.")
    ] = False,
    form: Annotated[str, format_option("table", "csv", "json", text="table, csv or json.")] = "table",
) -> int:
    """Show usage by key, model and so on, from the ledger.

    Reads the ledger's database, whether the gateway runs or not, or with --admin a gateway elsewhere. Days and times are UTC.

    With --reconcile, it compares the ledger's tokens with those that the servers have counted, and explains the difference.
    """
    from gateway.config import load
    from gateway.config.problems import did_you_mean
    from gateway.usage.output import FORMATS
    from gateway.usage.queries import DEFAULT_BY, parse_query, parse_report, query_ledger
    from gateway.usage.reconciliation_output import FORMATS as RECONCILIATION_FORMATS
    from gateway.usage.reconciliation_queries import Reconciliation, parse_reconciliation, parse_reconciliation_query, reconcile_ledger

    given = {"by": None if reconcile and by == DEFAULT_BY else by, "since": since, "until": until, "key": key, "team": team, "model": model}
    parameters = {name: value for name, value in (given | {"reconcile": "true" if reconcile else None}).items() if value is not None}
    (parse_reconciliation_query if reconcile else parse_query)(parameters, datetime.now(UTC))
    known = None if where.is_elsewhere else load(where.config)
    if known is None:
        with connected(where) as gateway:
            found = (parse_reconciliation if reconcile else parse_report)(gateway.read("/usage", parameters))
    elif known.ledger is None:
        return say_error(f"{where.config} has no ledger", FAILED)
    else:
        found = (reconcile_ledger if reconcile else query_ledger)(known.ledger, where.folder, parameters)
    if isinstance(found, Reconciliation):
        RECONCILIATION_FORMATS[form](found, console())
        return 0
    FORMATS[form](found, console())
    if found.truncated:
        say_error(f"only the {len(found.sums):,} groups with the most tokens are shown; narrow the query", 0)
    if known is None or found.sums or key is None:
        return 0
    ids = [each.id for each in known.keys]
    if key not in ids:
        say_error(f"{where.config} has no key {key}{did_you_mean(key, ids)}", 0)
    return 0


@with_gateway
def limits(
    where: Where,
    key: Annotated[str | None, option("Only the limits that this key is subject to.", "ID")] = None,
    team: Annotated[str | None, option("Only the limits of this team.", "ID")] = None,
    form: Annotated[str, format_option("table", "csv", "json", text="table, csv or json.")] = "table",
) -> None:
    """Show the limits of keys and teams.

    Shows the use in the running gateway, the remaining amounts, and when they are available again.
    """
    from gateway.admin.limits_output import FORMATS

    query = {name: value for name, value in (("key", key), ("team", team)) if value is not None}

    with connected(where) as gateway:
        FORMATS[form](gateway.read("/limits", query)["limits"], console())


@with_gateway
def queue(
    where: Where,
    model: Annotated[str | None, option("Only the queue of this model.", "ID")] = None,
    form: Annotated[str, format_option("table", "json", text="table or json.")] = "table",
) -> None:
    """Show the requests that wait, and each key's share.

    Shows the waiting and dispatched requests of each class, team and key, their mean wait, and their service. If slots are reserved, also
    those that later classes may use.
    """
    from gateway.admin.queue_output import print_flows, print_open_slots

    found = request(where, "GET", "/queue", None if model is None else {"model": model})
    if form == "json":
        print_json(found)
    else:
        print_flows(found["flows"], console())
        print_open_slots(found["open_slots"], console())


@with_config
def command(where: Where, model: Model) -> int:
    """Print the commands that launch a model's servers.

    One command for each replica, for a shell, with the variables that the gateway adds to the environment. Secrets and the internal
    key are shown as ***. XXXXXXXX stands for the private folder that each run creates.
    """
    from gateway.cli.launch_command import shown_launches
    from gateway.config import load
    from gateway.config.problems import did_you_mean

    known = load(where.config)
    if (found := next((each for each in known.models if each.id == model), None)) is None:
        return say_error(f"there is no model {model} in {where.config}{did_you_mean(model, [each.id for each in known.models])}", FAILED)
    if found.launch is None:
        return say_error(f"{model} is not launched: {'it is a split' if found.split else 'its servers run elsewhere'}", FAILED)
    typer.echo("\n\n".join(shown_launches(known, model)))
    return 0


def _operation(name: str, about: str, *, of_server: bool = False) -> Command:
    """Return a command that performs an operation on a model of the running gateway, or on one server."""

    def run(where: Where, target: str) -> None:
        from gateway.admin.status_view import in_a_line

        path = f"/servers/{quote(target, safe='')}/{name}" if of_server else f"/models/{quote(target)}/{name}"
        typer.echo(in_a_line(request(where, "POST", path), with_servers=of_server))

    run.__annotations__["target"] = Server if of_server else Model
    run.__doc__ = about
    return with_gateway(run)


@with_gateway
def drain(where: Where) -> None:
    """Stop the running gateway, as SIGTERM does.

    The gateway accepts no more requests, gives open requests `server.drain` to finish, and stops.
    """
    request(where, "POST", "/drain")
    typer.echo("the gateway is stopping; open requests finish first")


@with_gateway
def reload(where: Where) -> int:
    """Reload the configuration of the running gateway.

    Prints what has changed, or the problems. With problems nothing changes, and the exit code is 2.
    """
    read = request(where, "POST", "/reload")
    for problem in read["problems"]:
        typer.echo(problem, err=True)
    if not read["successful"]:
        typer.echo("nothing was applied; the previous configuration stays in use", err=True)
        return BAD_USAGE
    for line in (*(read["changes"] or _already_applied(read)), *read["needs_restart"]):
        typer.echo(line)
    return 0


def _already_applied(read: Mapping[str, Any]) -> list[str]:
    """Return the lines about a reload without changes: the gateway may have noticed them before the command."""
    if (earlier := read.get("earlier")) is None:
        return ["nothing has changed"]
    return [f"already applied {max(read['when'] - earlier['when'], 0):.1f} s ago:", *earlier["changes"]]


def _counted(config: Config, notes: int) -> str:
    counts = {"model": len(config.models), "key": len(config.keys), "note": notes}
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())


@with_gateway
def login_link(
    where: Where,
    user: Annotated[str, option("The name of the person.", "NAME", "--user")],
    role: Annotated[str | None, option("viewer, operator or admin, on the admin port.", "ROLE", "--role")] = None,
    team: Annotated[list[str] | None, option("A team of the person; may be repeated.", "TEAM", "--team")] = None,
    owned_team: Annotated[list[str] | None, option("A team that the person owns.", "TEAM", "--owned-team")] = None,
) -> None:
    """Create a link that signs in a person once.

    Prints the URL of the link for each port. The link can be used on one port, within 15 minutes. It needs `sign_in` in the configuration.
    """
    query = {"user": user, "role": role, "team": team or [], "owned_team": owned_team or []}
    for url in request(where, "POST", "/admin/v1/sign-in-links", {name: value for name, value in query.items() if value})["urls"]:
        typer.echo(url)


_COMMANDS: dict[str, Command] = {
    "serve": serve,
    "check": check,
    "status": status,
    "reload": reload,
    "drain": drain,
    "usage": usage,
    usage_commands.CLOSE: usage_commands.close,
    "requests": usage_commands.requests,
    "limits": limits,
    "queue": queue,
    "login-link": login_link,
    "start": _operation("start", "Start a model's servers. Does not wait until they are ready."),
    "stop": _operation("stop", "Stop a model's servers until `start` or `wake`. Waits until they have stopped."),
    "restart": _operation("restart", "Replace a model's servers, one after the other. Does not wait for the new ones."),
    "wake": _operation("wake", "Start a model as a request for it would. Does not wait until it is ready."),
    "cordon": _operation(
        "cordon", "Take one server out of rotation until `uncordon`. Its requests finish or continue elsewhere.", of_server=True
    ),
    "uncordon": _operation("uncordon", "Return a server to rotation.", of_server=True),
    "replay": record_commands.replay,
    "command": command,
    "schema": schema,
    "demo": demo,
}
