"""What the operator reads on the terminal: the summary at the start, servers that come up or fail, and the end.

On a terminal in color, elsewhere as plain lines, and as lines of the log where that is for programs. Each message begins with its time
and level, as the lines of the log do; the summary alone is a table. It goes to standard error: standard output is the access log's. The
rule: what is known already is not repeated, so a server that fails again and again for the same cause adds one line each time.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.config import Config, Model, Problem
from gateway.control.discovery import Change, source_of
from gateway.fleet.operations import Reading
from gateway.system import logs
from upstream.launcher.lifecycle import LaunchState, LaunchStatus
from upstream.launcher.schedule import Action, ActionKind
from upstream.vllm.failures import Cause
from upstream.vllm.health import ServerHealth

_STYLES: Mapping[int, str] = MappingProxyType({logging.ERROR: "red", logging.WARNING: "yellow", logging.INFO: "green"})
_log = logging.getLogger("vllm_gateway.control")
_DONE = {
    ActionKind.START: "is started",
    ActionKind.WAKE: "is woken",
    ActionKind.DRAIN: "takes no new requests",
    ActionKind.RESUME: "takes requests again",
    ActionKind.SLEEP: "is put to sleep",
    ActionKind.STOP: "is stopped",
}


class Announcer:
    """Writes to the operator. ``interval`` is how often, in seconds, waiting is told of."""

    interval = 5.0

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._failures: dict[str, Cause | None] = {}
        """By server, the cause that was reported last, until the server is up again."""

    def summary(self, config: Config, data: socket.socket, admin: socket.socket) -> None:
        """Models, servers, addresses, and where metrics are."""
        self._show(config)
        scheme = "https" if config.server.tls else "http"
        keys = f"{len(config.keys)} {'key' if len(config.keys) == 1 else 'keys'}"
        self._show_line(f"requests  [bold]{scheme}://{_place(data)}/v1[/bold]  ({keys})")
        self._show_line(f"metrics   http://{_place(admin)}/metrics  (also /status /readyz /livez)")

    def _show(self, config: Config) -> None:
        if logs.for_programs():
            for model in config.models:
                _log.info("serves %s: %s", model.id, _servers(model), extra={"model": model.id})
            return
        table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
        for title in ("model", "aliases", "servers"):
            table.add_column(title, overflow="fold")
        for model in config.models:
            table.add_row(escape(model.id), escape(", ".join(model.aliases)) or "-", escape(_servers(model)))
        self._console.print(table)

    def cannot_launch(self, problem: Problem) -> None:
        """A program or a file that a launch needs is missing; the other models are served all the same."""
        self._say(f"[red]{escape(str(problem))}[/red]", logging.ERROR)

    def waiting(self, names: Sequence[str], seconds: float, last_line: Callable[[str], str]) -> None:
        """These servers have not come up yet."""
        for name in names:
            self._say(f"waiting for {escape(name)} ({seconds:.0f} s)  [dim]{escape(last_line(name)[:160])}[/dim]")

    def serving(self, up: int, total: int) -> None:
        """Every server has come up or failed; one that is started on demand is not among the ``total``."""
        if not total:
            self._say("[green]ready[/green]: models start when they are asked for")
            return
        if up:
            self._say(f"[green]ready[/green]: {up} of {total} servers up")
        else:
            self._say(f"[red]no server is up[/red] (of {total})", logging.ERROR)

    def launched(self, status: LaunchStatus) -> None:
        """A launched server has changed its state."""
        if status.state is LaunchState.READY:
            self._failures.pop(status.name, None)
            self._say(f"{escape(status.name)} is up")
        elif status.state is LaunchState.STOPPED:
            self._failures.pop(status.name, None)
        elif status.state in (LaunchState.CRASHED, LaunchState.FAILED):
            self._failed(status)

    def _failed(self, status: LaunchStatus) -> None:
        """A failure: the root cause and what to change; the end of the log only where the cause is not known."""
        cause = status.cause
        repeated = status.name in self._failures and self._failures[status.name] == cause
        self._failures[status.name] = cause
        more = []
        if not repeated and cause is not None:
            more.append(f"Hint: {cause.hint}")
        if not repeated and not (cause and cause.summary) and status.tail:
            more += [f"The last lines of {status.log}:", *(f"| {line}" for line in status.tail.splitlines())]
        self._say(
            "\n  ".join([f"[red]{escape(status.reason)}[/red]", *map(escape, more)]),
            logging.ERROR,
            {"server": status.name, "cause": cause.code if cause else None},
        )

    def probed(self, probe: ServerHealth) -> None:
        """A server's health has changed."""
        if probe.up:
            self._say(f"{escape(probe.name)} is up")
        else:
            self._say(f"{escape(probe.name)} is down: {escape(probe.reason)}", logging.WARNING)

    def found(self, change: Change) -> None:
        """Servers have come or gone."""
        counts = ", ".join(f"{count} {word}" for count, word in ((change.new, "new"), (change.gone, "gone")) if count)
        self._say(f"{escape(change.model)}: servers were found: {counts}, {change.total} in all")

    def acts(self, action: Action) -> None:
        """A model is brought up or down."""
        self._say(f"{escape(action.model)} {_DONE[action.kind]} ({escape(action.why)})")

    def reloaded(self, reading: Reading) -> None:
        """The files of the configuration have been read again."""
        if not reading.successful:
            self._say("[red]the configuration cannot be used, and the one before stays:[/red]", logging.ERROR)
            for problem in reading.problems:
                self._say(f"[red]{escape(problem)}[/red]", logging.ERROR)
            return
        self._say(f"the configuration was read again{'' if reading.changes else ', and nothing has changed'}")
        for change in reading.changes:
            self._say(f"  {escape(change)}")
        for wait in reading.waiting:
            self._say(f"[yellow]  {escape(wait)}[/yellow]", logging.WARNING)

    def lingering(self, seconds: float) -> None:
        """The word to stop has come, and requests are served on for a while."""
        self._say(f"stopping in {seconds:g} s; /readyz fails from now on (once more to go on at once)")

    def stopping(self, drain: float) -> None:
        """The word to stop has come."""
        self._say(f"stopping: requests have {drain:g} s to finish (once more to stop at once)")

    def stopped(self) -> None:
        """The gateway has stopped, and nothing of it is left."""
        self._say("stopped")

    def _say(self, text: str, level: int = logging.INFO, about: Mapping[str, str | None] = MappingProxyType({})) -> None:
        """Write a message with its time and level. ``text`` has rich's markup; ``about``: members of the log line for programs."""
        if logs.for_programs():
            _log.log(level, " ".join(Text.from_markup(text).plain.split()), extra=dict(about))
        else:
            name = logging.getLevelName(level)
            self._print(f"[dim]{logs.timestamp(time.time())}[/dim] [{_STYLES[level]}]{name}[/] [dim]control:[/dim] {text}")

    def _show_line(self, text: str) -> None:
        """Write a line of the summary."""
        if logs.for_programs():
            _log.info(" ".join(Text.from_markup(text).plain.split()))
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        try:
            self._console.print(text, soft_wrap=True)
        except OSError:
            pass  # nobody reads the terminal any more: serving goes on


def _servers(model: Model) -> str:
    if model.discover is not None:
        return f"found by {source_of(model.discover)}"
    launched = [f"{model.launch.replicas} launched ({' '.join(model.launch.command)})"] if model.launch is not None else []
    return ", ".join([*launched, *(server.url for server in model.servers or ())])


def _place(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  # shown, not bound
        host = "localhost"
    return escape(f"[{host}]:{port}") if ":" in host else f"{host}:{port}"
