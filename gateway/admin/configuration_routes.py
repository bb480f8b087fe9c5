"""The route of the configuration: what is in use, and what a reload of its files would do.

The rule: values are without secrets, and only operators get them. The sentences for viewers name settings and IDs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.access.actor import Actor, Role
from gateway.access.permissions import has_role
from gateway.admin.audited import Handler, json_response
from gateway.fleet.operations import Preview

CONFIGURATION = "/admin/v1/configuration"
_SENTENCES = ("changes", "needs_restart", "restarts", "starts", "stops")


class Files(Protocol):
    """The files of the configuration."""

    async def preview(self) -> Preview:
        """Read the files now, and return what a reload would do."""


def handlers(files: Files) -> dict[str, Handler]:
    """Return the handlers by path."""

    async def configuration(request: Request) -> Response:
        actor: Actor = request.state.requester.actor
        return json_response(_document(await files.preview(), with_values=has_role(actor, Role.OPERATOR)))

    return {CONFIGURATION: configuration}


def _document(found: Preview, *, with_values: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "files": [str(file) for file in found.files],
        "applied": found.applied,
        "by": None if found.by is None else str(found.by),
        "last": found.last.as_json(),
        "problems": [asdict(problem) for problem in found.problems],
    }
    shown |= {name: getattr(found, name) for name in _SENTENCES}
    if with_values:
        shown["values"] = [{"path": name, **_sides(found, name)} for name in dict.fromkeys((*found.loaded, *found.read))]
    return shown


def _sides(found: Preview, name: str) -> dict[str, Any]:
    """Return the value in use and the one in the file. A side without the setting has no value."""
    sides = {"loaded": found.loaded, "file": found.read}
    return {side: values[name] for side, values in sides.items() if name in values}
