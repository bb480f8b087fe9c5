"""What the operator reads on the terminal: the summary at the start, servers coming up, and the end.

On a terminal in colour, elsewhere as plain lines, and as lines of the log where that is for programs. It goes to standard error:
standard output is the access log's.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway import logs
from gateway.config import Config, Model
from gateway.discovery import Change, source_of
from gateway.reload import Reading
from upstream.health import Probe
from upstream.launcher import Snapshot
from upstream.launcher import State as Stage
from upstream.launcher.schedule import Action, Do

_LEVELS = (("[red]", logging.ERROR), ("[yellow]", logging.WARNING))
_log = logging.getLogger("vllm_gateway.control")
_DONE = {
    Do.START: "is started",
    Do.WAKE: "is woken",
    Do.DRAIN: "takes no new requests",
    Do.RESUME: "takes requests again",
    Do.SLEEP: "is put to sleep",
    Do.STOP: "is stopped",
}


class Announcer:
    """Writes to the operator. ``interval`` is how often, in seconds, waiting is told of."""

    interval = 5.0

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    def summary(self, config: Config, data: socket.socket, admin: socket.socket) -> None:
        """Models, servers, addresses, and where metrics are."""
        self._show(config)
        scheme = "https" if config.server.tls else "http"
        self._say(f"requests  [bold]{scheme}://{_place(data)}/v1[/bold]  ({len(config.keys)} {'key' if len(config.keys) == 1 else 'keys'})")
        self._say(f"metrics   http://{_place(admin)}/metrics  (also /status /readyz /livez)")

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

    def waiting(self, names: Sequence[str], seconds: float, last_line: Callable[[str], str]) -> None:
        """These servers have not come up yet."""
        for name in names:
            self._say(f"waiting for {escape(name)} ({seconds:.0f} s)  [dim]{escape(last_line(name)[:160])}[/dim]")

    def serving(self, up: int, total: int) -> None:
        """Every server has come up or failed; one that is started on demand is not among the ``total``."""
        if not total:
            self._say("[green]ready[/green]: models start when they are asked for")
            return
        self._say(f"[green]ready[/green]: {up} of {total} servers up" if up else f"[red]no server is up[/red] (of {total})")

    def launched(self, snapshot: Snapshot) -> None:
        """A launched server has changed its state."""
        if snapshot.state is Stage.READY:
            self._say(f"{escape(snapshot.name)} is up")
        elif snapshot.state in (Stage.CRASHED, Stage.FAILED):
            self._say(f"[red]{escape(snapshot.reason)}[/red]")

    def probed(self, probe: Probe) -> None:
        """A server's health has changed."""
        self._say(f"{escape(probe.name)} is {'up' if probe.up else 'down: ' + escape(probe.reason)}")

    def found(self, change: Change) -> None:
        """Servers have come or gone."""
        counts = ", ".join(f"{count} {word}" for count, word in ((change.new, "new"), (change.gone, "gone")) if count)
        self._say(f"{escape(change.model)}: servers were found: {counts}, {change.total} in all")

    def acts(self, action: Action) -> None:
        """A model is brought up or down."""
        self._say(f"{escape(action.model)} {_DONE[action.do]} ({escape(action.why)})")

    def reloaded(self, reading: Reading) -> None:
        """The files of the configuration have been read again."""
        if not reading.successful:
            self._say("[red]the configuration cannot be used, and the one before stays:[/red]")
            for problem in reading.problems:
                self._say(f"[red]{escape(problem)}[/red]")
            return
        self._say(f"the configuration was read again{'' if reading.changes else ', and nothing has changed'}")
        for change in reading.changes:
            self._say(f"  {escape(change)}")
        for wait in reading.waiting:
            self._say(f"[yellow]  {escape(wait)}[/yellow]")

    def lingering(self, seconds: float) -> None:
        """The word to stop has come, and requests are served on for a while."""
        self._say(f"stopping in {seconds:g} s; /readyz fails from now on (once more to go on at once)")

    def stopping(self, drain: float) -> None:
        """The word to stop has come."""
        self._say(f"stopping: requests have {drain:g} s to finish (once more to stop at once)")

    def _say(self, text: str) -> None:
        if logs.for_programs():
            level = next((level for colour, level in _LEVELS if colour in text), logging.INFO)
            _log.log(level, " ".join(Text.from_markup(text).plain.split()))
            return
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
