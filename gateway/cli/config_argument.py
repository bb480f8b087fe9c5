"""The configuration of a command: its last argument, ``--config``, or by default ``gateway.yaml`` in the current folder.

The rule: every command that reads a configuration accepts all three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.output import BadUsageError

DEFAULT = Path("gateway.yaml")

ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="The configuration; default: gateway.yaml in the current folder.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The same as FILE.")]


def named_config(argument: Path | None, option: Path | None) -> Path | None:
    """Return the configuration that a command line names, or None. Raises BadUsageError if it names two."""
    if argument is not None and option is not None:
        raise BadUsageError(f"the configuration is given twice: {argument} and --config {option}")
    return option if argument is None else argument


def config_file(argument: Path | None, option: Path | None) -> Path:
    """Return the configuration that a command is to use. Raises BadUsageError if the command line names two."""
    return named_config(argument, option) or DEFAULT
