"""The status on a terminal, with the texts of the console. It is colored on a terminal, and plain text elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.admin.status_view import ModelRow, ServerRow, StatusView
from gateway.config.problems import one_line

_COLORS = {"ready": "green", "starting": "yellow", "draining": "magenta", "sleeping": "blue", "stopped": "dim", "failed": "red"}
_LINES = 5  # of a failed server's log
_COLUMNS = ("model", "state", "for", "in flight", "queued", "tokens/s")


def show(shown: StatusView, console: Console) -> None:
    """Print the status."""
    tone = "green" if shown.state == "ready" else "yellow"
    console.print(Text.assemble((shown.headline, f"bold {tone}"), "  ", (", ".join(shown.facts), "dim")))
    for warning in shown.warnings:
        console.print(Text(one_line(warning), "red"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in _COLUMNS:
        table.add_column(title, overflow="fold", justify="right" if title in ("in flight", "queued") else "left")
    for model in shown.models:
        for row in _rows(model):
            table.add_row(*row)
    console.print(table)
    for split in shown.splits:
        console.print(Text(one_line(split)), soft_wrap=True)
    for model in shown.models:
        for server in model.servers:
            for line in _details(server):
                console.print(line, soft_wrap=True)


def _rows(model: ModelRow) -> Iterator[tuple[Text, ...]]:
    queued = f"{model.queued} ({model.waiting})" if model.waiting else str(model.queued)
    cells = (model.since, str(model.in_flight), queued, model.speed)
    yield (Text(one_line(model.id), "bold"), _state(model.state), *map(Text, cells))
    for server in model.servers:
        yield (Text(f"  {one_line(server.name)}", "dim"), _state(server.state), Text(server.since), Text(server.load))
    for one in model.adapters:
        yield (Text(f"  {one_line(one.id)} (LoRA)", "dim"), Text(), Text(), Text(str(one.in_flight)), Text(), Text(one.speed))


def _state(state: str) -> Text:
    return Text(state, _COLORS[state])


def _details(server: ServerRow) -> Iterator[Text]:
    """Yield the lines about a server in addition to its state."""
    reason = server.reason.removeprefix(f"{server.name} ")  # as it starts for a launched server
    for sentence, style in (
        (server.progress, ""),
        (reason, "red"),
        (server.last_failure, "dim"),
        *((each, "dim") for each in server.routing),
    ):
        if sentence:
            yield Text.assemble((one_line(server.name), "bold"), ": ", (one_line(sentence), style))
    if server.hint:
        yield Text(f"  Hint: {one_line(server.hint)}")
    if server.state == "failed" and server.lines:
        yield Text(f"  end of {one_line(server.log)}:", "dim")
        yield from (Text(f"  | {one_line(line)}", "dim") for line in server.lines[-_LINES:])
