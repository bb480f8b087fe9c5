"""The output of commands: one line for an error, one for each problem of a configuration, and the exit codes.

0 is success, 1 a failure, 2 an invalid command line or configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from gateway.config import Problem

Command = Callable[..., int | None]
"""A command. It returns its exit code; without one, it has succeeded."""
FAILED, BAD_USAGE = 1, 2
NAME = "vllm-gateway"
_WIDE = 200


class BadUsageError(typer.TyperException):
    """The command line is invalid."""

    exit_code = BAD_USAGE


def console() -> Console:
    """Return the console for tables. Without a terminal there is no width, and nothing is wrapped."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def print_table(titles: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
    """Print a table. Markup in a text has no effect."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console().print(table)


def option(text: str, metavar: str, *names: str) -> Any:
    """Return an option whose help shows no default. ``names``: those on the command line, by default the parameter's."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def format_option(*formats: str, text: str) -> Any:
    """Return the option ``--format`` of a command. ``text`` describes the formats."""

    def known(form: str) -> str:
        if form not in formats:
            raise BadUsageError(f"--format is one of {', '.join(formats)}")
        return form

    return typer.Option("--format", metavar="FORMAT", help=text, parser=known)


def say_error(message: str, code: int) -> int:
    """Print an error as one line on standard error, and return the code."""
    typer.echo(f"{NAME}: {' '.join(message.split())}", err=True)
    return code


def print_problem(problem: Problem, color: str, *, err: bool = False) -> None:
    """Print a problem as one line. On a terminal its position is bold and its message colored."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        typer.echo(str(problem), err=err)
        return
    from rich.console import Console
    from rich.text import Text

    position, message = str(problem).removesuffix(problem.message), problem.message
    text = Text.assemble((position, "bold"), (message, color)) if position != str(problem) else Text(position)
    Console(stderr=err, highlight=False).print(text, soft_wrap=True)
