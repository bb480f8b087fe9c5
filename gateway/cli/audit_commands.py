"""The commands ``vllm-gateway audit …``: list the entries of the audit log, and verify its chains.

They read the log of a configuration: its file, or the table of the store and what waits on disk. The gateway may run meanwhile. The rule:
texts of entries come from clients, so control characters never reach a terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.admin_call import Where, with_config
from gateway.cli.output import BAD_USAGE, FAILED, Command, format_option, option, say_error

if TYPE_CHECKING:
    from gateway.audit.log import Where as Log
    from gateway.config import Config

Older = Annotated[list[Path] | None, option("An earlier file of the same log, the oldest first; can be repeated.", "FILE", "--older")]


@with_config
def list_entries(
    where: Where,
    since: Annotated[str | None, option("Only entries from this date or time on, e.g. 2027-01-31.", "WHEN")] = None,
    action: Annotated[str | None, option('Only these actions, e.g. "key.*" or "*.refused".', "GLOB")] = None,
    actor: Annotated[str | None, option('Only these actors, e.g. "token ci" or "person *".', "GLOB")] = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, help="The most entries that are listed: the last ones.")] = 100,
    form: Annotated[str, format_option("table", "json", text="table or json (lines, as they are stored).")] = "table",
    older: Older = None,
) -> int:
    """List the entries of the audit log, the oldest first.

    It does not verify them: see `vllm-gateway audit verify`.
    """
    from gateway.audit.lines import log_lines
    from gateway.audit.listing import Filter, instant, listed, row

    try:
        first = None if since is None else instant(since)
    except ValueError as error:
        return say_error(f"--{error}", BAD_USAGE)

    def show(_: Config, log: Log) -> int:
        for line, data in listed(log_lines(log, older or []), Filter(first, action, actor), limit):
            typer.echo(row(line) if form == "table" else data.decode())
        return 0

    return _with_log(where, show)


@with_config
def verify(
    where: Where,
    checkpoints: Annotated[
        list[Path] | None, option("A copy of the gateway's log, whose checkpoints must be in the chain.", "FILE")
    ] = None,
    secret_file: Annotated[
        list[Path] | None, option("A file with an earlier audit.secret, for older chains; can be repeated.", "FILE")
    ] = None,
    older: Older = None,
) -> int:
    """Verify the chains of the audit log.

    Prints the first broken entry and exits with 1, or prints the length of each chain. On the machine of the gateway, it also compares
    the end of the chain with the checkpoint that the gateway has stored. On another machine, --checkpoints shows removed entries at the
    end.
    """
    from gateway.audit.lines import moved_files
    from gateway.audit.location import key_of
    from gateway.audit.verification import verify_log

    def act(known: Config, log: Log) -> int:
        assert known.audit is not None
        keys = [key_of(known.audit.secret.get_secret_value())]
        try:
            keys += [key_of(each.read_text().strip("\r\n")) for each in secret_file or []]
            logs = [each.read_text(errors="replace") for each in checkpoints or []]
        except (OSError, ValueError) as error:
            return say_error(f"{getattr(error, 'filename', None) or '--secret-file'} cannot be read: {error}", FAILED)
        result = verify_log(log, keys, logs, moved_files(log) if older is None else older)
        if result.broken is not None:
            typer.echo(f"broken: {result.broken}")
            return FAILED
        for checkpoint in result.checkpoints:
            typer.echo(f"chain {checkpoint.chain}: {checkpoint.seq} entries")
        typer.echo(f"verified: {result.entries} entries, {result.compared} checkpoints")
        return 0

    return _with_log(where, act)


def _with_log(where: Where, act: Callable[[Config, Log], int]) -> int:
    """Run a command on the log of a configuration. Returns the exit code."""
    from gateway.audit.location import where_of
    from gateway.config import load
    from gateway.control.serve import state_folder
    from gateway.ledger.errors import DatabaseUnavailableError

    known = load(where.config)
    if known.audit is None:
        return say_error(f"{where.config} has no audit log; set audit", FAILED)
    log = where_of(known.audit, known, where.config, state_folder())
    with closing(log.table) if log.table is not None else nullcontext():
        try:
            return act(known, log)
        except DatabaseUnavailableError as error:
            return say_error(f"the audit log's database does not respond: {error}", FAILED)
        except OSError as error:
            return say_error(f"{error.filename} cannot be read: {error.strerror}", FAILED)


def commands() -> dict[str, Command]:
    """Return the commands by name."""
    return {"list": list_entries, "verify": verify}
