"""The output of commands: one line for an error, one for each problem of a configuration, and the exit codes.

0 is success, 1 a failure, 2 an invalid command line or configuration.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.config import Problem

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
