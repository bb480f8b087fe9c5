"""How commands speak: one line for an error, one for each problem of a configuration, and the exit codes.

0 means fine, 1 that it failed, 2 a wrong command line or a wrong configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from gateway.config import Problem

FAILED, BAD_USAGE = 1, 2
NAME = "vllm-gateway"


def say_error(message: str, code: int) -> int:
    """One line on standard error, whatever the message holds; returns the code."""
    typer.echo(f"{NAME}: {' '.join(message.split())}", err=True)
    return code


def print_problems(problems: Iterable[Problem], *, err: bool = False) -> int:
    """A line for each problem; returns the exit code for it."""
    for problem in problems:
        print_problem(problem, "red", err=err)
    return BAD_USAGE


def print_problem(problem: Problem, color: str, *, err: bool = False) -> None:
    """One line; at a terminal its place is bold, its message colored and nothing is cut."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        typer.echo(str(problem), err=err)
        return
    from rich.console import Console
    from rich.text import Text

    place, message = str(problem).removesuffix(problem.message), problem.message
    text = Text.assemble((place, "bold"), (message, color)) if place != str(problem) else Text(place)
    Console(stderr=err, highlight=False).print(text, soft_wrap=True)
