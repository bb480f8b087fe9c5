"""The commands ``vllm-gateway record show`` and ``vllm-gateway replay``: print a record, and send its request again.

They read the store of a configuration. The gateway may run meanwhile. The rule: texts of records come from clients and models, so control
characters never reach a terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.admin_call import Where, with_config
from gateway.cli.output import BAD_USAGE, FAILED, Command, option, say_error

if TYPE_CHECKING:
    from gateway.config import Config

KEY_VARIABLE = "VLLM_GATEWAY_KEY"
_LOCAL = {4: "127.0.0.1", 6: "[::1]"}

Identity = Annotated[str, typer.Argument(metavar="ID", help="The ID of the request: its header x-request-id.")]


@with_config
def show(where: Where, identity: Identity) -> int:
    """Print the record of a request, as JSON.

    Bodies that are JSON are shown as such.
    """

    def act(_: Config, record: dict[str, Any]) -> int:
        shown = record | {name: _readable(record[name]) for name in ("request", "sent", "response")}
        typer.echo(_escaped(json.dumps(shown, indent=2, ensure_ascii=False)))
        return 0

    return _with_record(where, identity, act)


@with_config
def replay(
    where: Where,
    identity: Identity,
    model: Annotated[str | None, option("The model to request; default: the recorded one.", "MODEL")] = None,
    url: Annotated[str | None, option("The data port; default: the configured port on this machine.", "URL")] = None,
    key_file: Annotated[Path | None, option(f"A file with the key to use; default: the variable {KEY_VARIABLE}.", "FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print both outcomes and what is the same, as JSON.")] = False,
) -> int:
    """Send a recorded request again, and compare the responses.

    It is an ordinary request: the limits of the key apply, and it costs what it uses.
    """
    import httpx2

    from gateway.recording.comparison import compared, sentences
    from gateway.recording.replay import recorded_outcome
    from gateway.recording.replay import replay as send

    try:
        key = os.environ.get(KEY_VARIABLE) if key_file is None else key_file.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        return say_error(f"{key_file} cannot be read: {getattr(error, 'strerror', None) or 'it holds no key'}", FAILED)

    def act(known: Config, record: dict[str, Any]) -> int:
        target = url or _data_port(known)
        if target is None:
            return say_error("server.port is 0, so name the data port with --url", BAD_USAGE)
        try:
            before, after = recorded_outcome(record), send(record, model, target.rstrip("/"), key)
        except httpx2.HTTPError as error:
            return say_error(f"{target} does not respond: {error}", FAILED)
        if as_json:
            typer.echo(json.dumps(compared(before, after) | {"redacted": record["redacted"]}))
            return 0
        if record["redacted"]:
            typer.echo("Redacted values are sent as they are stored, and differ in the comparison.")
        for line in sentences(before, after):
            typer.echo(line)
        return 0

    return _with_record(where, identity, act)


def _with_record(where: Where, identity: str, act: Callable[[Config, dict[str, Any]], int]) -> int:
    """Run a command on a record. Returns the exit code."""
    from gateway.config import load
    from gateway.fleet.snapshot_builder import recording
    from gateway.recording.reading import read_record

    known = load(where.config)
    if known.record is None:
        return say_error(f"{where.config} records no requests; set record", FAILED)
    return act(known, read_record(recording(known.record), identity))


def _data_port(known: Config) -> str | None:
    """Return the URL of the data port on this machine; None if the port is not known."""
    server = known.server
    if not server.port:
        return None
    try:
        address = ip_address(server.host)
    except ValueError:
        host = server.host
    else:
        host = _LOCAL[address.version] if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
    return f"{'http' if server.tls is None else 'https'}://{host}:{server.port}"


def _readable(part: dict[str, Any] | None) -> Any:
    """Return a body of a record as JSON if its text is JSON."""
    if part is None or "text" not in part:
        return part
    try:
        return {**part, "text": json.loads(part["text"])}
    except ValueError:
        return part


def _escaped(text: str) -> str:
    """Return JSON in which characters that are not printable are escaped."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\u{ord(each):04x}" for each in text)


def commands() -> dict[str, Command]:
    """Return the commands of the group ``record`` by name."""
    return {"show": show}
