"""The gateway that a command means, and requests to a running one.

Owns the arguments and options that name a gateway: a configuration as FILE or ``--config``, by default ``gateway.yaml`` in the current
folder, and ``--admin`` for a gateway elsewhere. A local gateway is found by its configuration. The rules: every command that reads a
configuration accepts FILE and ``--config``, and FILE is its last argument. Every error is one sentence for the operator, and an exit code.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gateway.cli.output import BadUsageError, Command

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient

DEFAULT = Path("gateway.yaml")
_CONFIG: Mapping[str, Any] = {
    "file": Annotated[Path | None, typer.Argument(metavar="FILE", help="The configuration; default: gateway.yaml in the current folder.")],
    "config": Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The same as FILE.")],
}
_GATEWAY: Mapping[str, Any] = {
    **_CONFIG,
    "admin": Annotated[
        str | None,
        typer.Option("--admin", metavar="URL", help="The admin port of a gateway, e.g. http://10.0.0.7:9090, instead of a FILE."),
    ],
    "token_file": Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="With --admin: a file with the server.admin.token of that gateway.")
    ],
}


class Where(NamedTuple):
    """The gateway that a command means: the local gateway with a configuration, or the gateway behind an admin port.

    ``named`` is the configuration that the command line names, None for the default.
    """

    named: Path | None = None
    admin: str | None = None
    token_file: Path | None = None

    @property
    def config(self) -> Path:
        """The configuration that the command is to use."""
        return self.named or DEFAULT

    @property
    def folder(self) -> Path:
        """The folder of the configuration."""
        return Path(os.path.abspath(self.config)).parent

    @property
    def is_elsewhere(self) -> bool:
        """Whether the command line names an admin port, or its token."""
        return self.admin is not None or self.token_file is not None

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


@contextmanager
def connected(where: Where) -> Iterator[AdminClient]:
    """Connect to a gateway. The command ends if the gateway cannot be reached, or refuses a request."""
    from gateway.admin.client import RefusedError, UnreachableError

    if where.token_file is not None and where.admin is None:
        raise BadUsageError("--token-file requires --admin; a local gateway of this user needs no token")
    try:
        client = where.client()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it holds no token"
        raise typer.TyperException(f"{where.token_file} cannot be read: {why}") from error
    try:
        with client as gateway:
            yield gateway
    except UnreachableError as error:
        raise typer.TyperException(where.unreachable(str(error))) from error
    except RefusedError as error:
        raise typer.TyperException(str(error)) from error


def request(where: Where, method: str, path: str, query: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Send one request to a gateway (see ``AdminClient.send``). The command ends if it fails."""
    with connected(where) as gateway:
        return gateway.send(method, path, query, **more)


def with_config(command: Command) -> Command:
    """Return a command whose first parameter, the ``Where``, is a configuration on the command line."""
    return _with_options(command, _CONFIG)


def with_gateway(command: Command) -> Command:
    """Return a command whose first parameter, the ``Where``, is a configuration or an admin port on the command line."""
    return _with_options(command, _GATEWAY)


def _with_options(command: Command, options: Mapping[str, Any]) -> Command:
    @functools.wraps(command)
    def run(file: Path | None, config: Path | None, admin: str | None = None, token_file: Path | None = None, **given: Any) -> int | None:
        if file is not None and config is not None:
            raise BadUsageError(f"the configuration is given twice: {file} and --config {config}")
        return command(Where(file or config, admin, token_file), **given)

    signature = inspect.signature(command, eval_str=True)
    _, *own = signature.parameters.values()
    added = (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=each) for name, each in options.items())
    run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return run
