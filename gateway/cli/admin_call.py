"""Send the requests of commands to a running gateway: a local gateway of this user, or a gateway behind an admin port.

Owns the options for a remote gateway. A local gateway is found by its configuration. The rule: every error is one sentence for the
operator, and an exit code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gateway.cli.output import BAD_USAGE, FAILED, say_error

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient

AdminUrl = Annotated[
    str | None, typer.Option("--admin", metavar="URL", help="The admin port of a gateway, e.g. http://10.0.0.7:9090, instead of a FILE.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="With --admin: a file with the server.admin.token of that gateway.")
]


class Where(NamedTuple):
    """The gateway to call: the local gateway with a configuration, or the gateway behind an admin port."""

    config: Path
    admin: str | None = None
    token_file: Path | None = None

    def client(self) -> AbstractContextManager[AdminClient]:
        """Return a client. Raises OSError and ValueError if the token cannot be read."""
        from gateway.admin.client import admin_client, remote_admin_client
        from gateway.admin.unix_socket import socket_path

        if self.admin is None:
            return admin_client(socket_path(self.config, os.environ))
        return remote_admin_client(self.admin, None if self.token_file is None else _token(self.token_file))

    def unreachable(self, why: str) -> str:
        if self.admin is not None:
            return f"{self.admin}: {why}"
        found = f"no gateway of this user runs with {self.config}"
        if self.config.exists():
            return found
        return f"{found}, and there is no such file; name it as the last argument, or name the gateway with --admin URL"


def _token(file: Path) -> str:
    """Return the token in a file. Raises OSError and ValueError."""
    token = file.read_text("ascii").strip()
    if not token or not token.isprintable():
        raise ValueError("the token is not printable ASCII")
    return token


def call_gateway(where: Where, act: Callable[[AdminClient], None]) -> int:
    """Call a gateway, and return the exit code."""
    from gateway.admin.client import RefusedError, UnreachableError

    if where.token_file is not None and where.admin is None:
        return say_error("--token-file requires --admin; a local gateway of this user needs no token", BAD_USAGE)
    try:
        client = where.client()
    except (OSError, ValueError) as error:
        return say_error(f"{where.token_file} cannot be read: {getattr(error, 'strerror', None) or 'it holds no token'}", FAILED)
    try:
        with client as gateway:
            act(gateway)
    except UnreachableError as error:
        return say_error(where.unreachable(str(error)), FAILED)
    except RefusedError as error:
        return say_error(str(error), FAILED)
    return 0
