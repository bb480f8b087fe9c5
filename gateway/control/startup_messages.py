"""The messages of ``serve`` to the operator: the summary at the start, servers that become ready or fail, and the end.

On a terminal they are colored; elsewhere they are plain lines, or log lines with ``log.format: json``. Each message begins with its time
and level, as the lines of the log do. Only the summary is a table. Messages go to standard error, because standard output is the access
log's. The rule: details are not repeated, so a server that fails repeatedly for the same cause adds one line each time.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.config import Config, Model, Problem
from gateway.fleet.operations import ReloadResult
from gateway.monitoring.discovery import ServerChange, source_of
from gateway.system import logs
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.launcher.schedule import Action, ActionKind
from upstream.vllm.failures import Cause
from upstream.vllm.health import ServerHealth
from upstream.vllm.probe_hints import probe_hint

_STYLES: Mapping[int, str] = {logging.ERROR: "red", logging.WARNING: "yellow", logging.INFO: "green"}
_WIDE = 10_000  # columns of a file: nothing is wrapped
_NAMED = 3
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  compared, not bound
_log = logging.getLogger("vllm_gateway.control")
_ACTIONS = {
    ActionKind.START: "starts",
    ActionKind.WAKE: "wakes up",
    ActionKind.DRAIN: "is draining",
    ActionKind.RESUME: "takes requests again",
    ActionKind.SLEEP: "goes to sleep",
    ActionKind.STOP: "stops",
}


class _Console(Console):
    """A console whose reader may exit before the gateway does."""

    def on_broken_pipe(self) -> None:
        """Discard this message and all later ones. Rich's own method ends the process."""
        self.quiet = True
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), self.file.fileno())  # what is buffered is written at exit


class Announcer:
    """Writes to the operator. ``interval`` is the time in seconds between two messages about awaited servers."""

    interval = 5.0

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or _Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _WIDE)
        self._waiting: Sequence[str] = ()
        self._waiting_due = 0.0
        self._failures: dict[str, Cause | None] = {}
        """The last reported cause of each server, until the server is ready again."""

    def summary(self, config: Config, data: socket.socket, admin: socket.socket) -> None:
        """Write the models, their servers, and the addresses for requests and metrics."""
        self._models(config)
        scheme = "https" if config.server.tls else "http"
        keys = f"{len(config.keys)} {'key' if len(config.keys) == 1 else 'keys'}"
        self._summary_line(f"requests  [bold]{scheme}://{_address(data)}/v1[/bold]  ({keys}{_reach(data)})")
        admin_scheme = "https" if config.server.admin.tls else "http"
        self._summary_line(f"metrics   {admin_scheme}://{_address(admin)}/metrics  (also /status /readyz /livez)")

    def _models(self, config: Config) -> None:
        if logs.for_programs():
            for model in config.models:
                _log.info("serves %s: %s", model.id, _servers(model), extra={"model": model.id})
            return
        table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
        for title in ("model", "aliases", "servers"):
            table.add_column(title, overflow="fold")
        for model in config.models:
            table.add_row(escape(model.id), escape(", ".join(model.aliases)) or "-", escape(_servers(model)))
        self._print(table)

    def cannot_launch(self, problem: Problem) -> None:
        """Report a missing program or file of a launch. The other models are served."""
        self._write(f"[red]{escape(str(problem))}[/red]", logging.ERROR)

    def waiting(self, names: Sequence[str], seconds: float, last_line: Callable[[str], str]) -> None:
        """Report servers that are not ready yet, in one line: if they are others, and after twice the time of the last report."""
        if list(names) == list(self._waiting) and seconds < self._waiting_due:
            return
        self._waiting, self._waiting_due = names, 2 * seconds
        if len(names) == 1:
            self._write(f"waiting for {escape(names[0])} ({seconds:.0f} s)  [dim]{escape(last_line(names[0])[:160])}[/dim]")
        else:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            self._write(f"waiting for {len(names)} servers ({seconds:.0f} s): {escape(', '.join(names[:_NAMED]))}{more}")

    def serving(self, up: int, total: int) -> None:
        """Report that every server is ready or has failed. ``total`` excludes servers that start on demand."""
        if not total:
            self._write("[green]ready[/green]: models start on demand")
            return
        if up:
            self._write(f"[green]ready[/green]: {up} of {total} servers up")
        else:
            self._write(f"[red]no server is up[/red] (of {total})", logging.ERROR)

    def launched(self, status: LaunchStatus) -> None:
        """Report a launched server that has entered another state."""
        if status.state is LaunchState.READY:
            self._failures.pop(status.name, None)
            self._write(f"{escape(status.name)} is up")
        elif status.state is LaunchState.STOPPED:
            self._failures.pop(status.name, None)
        elif status.state in (LaunchState.CRASHED, LaunchState.FAILED):
            self._failed(status)

    def _failed(self, status: LaunchStatus) -> None:
        """Report a failure: the root cause and a hint, and the end of the log only if the cause is unknown."""
        cause = status.cause
        repeated = status.name in self._failures and self._failures[status.name] == cause
        self._failures[status.name] = cause
        more = []
        if not repeated and cause is not None:
            more.append(f"Hint: {cause.hint}")
        if not repeated and not (cause and cause.summary) and status.tail:
            more += [f"The last lines of {status.log}:", *(f"| {line}" for line in status.tail.splitlines())]
        self._write(
            "\n  ".join([f"[red]{escape(status.reason)}[/red]", *map(escape, more)]),
            logging.ERROR,
            {"server": status.name, "cause": cause.code if cause else None},
        )

    def probed(self, probe: ServerHealth) -> None:
        """Report a server whose health has changed."""
        if probe.up:
            self._write(f"{escape(probe.name)} is up")
        else:
            hint = f"\n  Hint: {hint}" if (hint := probe_hint(probe.reason)) else ""
            self._write(f"{escape(probe.name)} is down: {escape(probe.reason)}{hint}", logging.WARNING)

    def found(self, change: ServerChange) -> None:
        """Report discovered servers that were added or removed."""
        counts = ", ".join(f"{count} {verb}" for count, verb in ((change.added, "added"), (change.removed, "removed")) if count)
        self._write(f"{escape(change.model)}: discovered servers changed: {counts}, {change.total} in total")

    def action_started(self, action: Action) -> None:
        """Report a model that is started or stopped."""
        self._write(f"{escape(action.model)} {_ACTIONS[action.kind]} ({escape(action.why)})")

    def reloaded(self, result: ReloadResult) -> None:
        """Report that the configuration was read again."""
        if not result.successful:
            self._write("[red]the configuration is invalid; the previous one stays in use:[/red]", logging.ERROR)
            for problem in result.problems:
                self._write(f"[red]{escape(problem)}[/red]", logging.ERROR)
            return
        self._write(f"the configuration was reloaded{'' if result.changes else ': no changes'}")
        for change in result.changes:
            self._write(f"  {escape(change)}")
        for setting in result.needs_restart:
            self._write(f"[yellow]  {escape(setting)}[/yellow]", logging.WARNING)

    def lingering(self, seconds: float) -> None:
        """Report that the gateway will stop, and serves requests until then."""
        self._write(f"stopping in {seconds:g} s; /readyz returns 503 from now on. Press Ctrl-C to stop now")

    def stopping(self, drain: float) -> None:
        """Report that the gateway drains."""
        self._write(f"draining for up to {drain:g} s. Press Ctrl-C to stop immediately")

    def stopped(self) -> None:
        """Report that the gateway has stopped, with all its processes."""
        self._write("stopped")

    def _write(self, text: str, level: int = logging.INFO, about: Mapping[str, str | None] = {}) -> None:
        """Write a message with its time and level. ``text`` has rich's markup. ``about`` are fields of the JSON log line."""
        if logs.for_programs():
            _log.log(level, " ".join(Text.from_markup(text).plain.split()), extra=dict(about))
        else:
            name = logging.getLevelName(level)
            self._print(f"[dim]{logs.timestamp(time.time())}[/dim] [{_STYLES[level]}]{name}[/] [dim]control:[/dim] {text}")

    def _summary_line(self, text: str) -> None:
        if logs.for_programs():
            _log.info(" ".join(Text.from_markup(text).plain.split()))
        else:
            self._print(text)

    def _print(self, message: str | Table) -> None:
        with suppress(OSError):  # the terminal is closed or the disk is full, and the gateway continues
            self._console.print(message, soft_wrap=isinstance(message, str))


def _servers(model: Model) -> str:
    if model.discover is not None:
        return f"discovered by {source_of(model.discover)}"
    if model.split is not None:
        return f"split: {', '.join(f'{name} {weight}' for name, weight in model.split.items())}"
    launched = [] if model.launch is None else [f"{model.launch.replicas} launched ({_command(model.launch.command)})"]
    return ", ".join([*launched, *(server.url for server in model.servers or ())])


def _command(command: Sequence[str]) -> str:
    program, *arguments = command
    return " ".join([PurePath(program).name, *arguments])


def _reach(listener: socket.socket) -> str:
    """Say that other machines can connect too, where the address that is shown names this one alone."""
    return "; listens on all addresses" if listener.getsockname()[0] in _ALL_ADDRESSES else ""


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in _ALL_ADDRESSES:
        host = "localhost"
    return escape(f"[{host}]:{port}") if ":" in host else f"{host}:{port}"
