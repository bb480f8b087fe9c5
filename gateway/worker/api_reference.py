"""The API reference as clients read it on the data port, where the configuration has ``server.docs``.

The rule: it is made when somebody first asks, in a thread, and kept; a worker that nobody asks loads and holds nothing of it.
"""

from __future__ import annotations

from functools import cached_property

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response

PATHS = frozenset({"/docs", "/openapi.json"})


class Manual:
    """The two pages of one worker."""

    async def page(self, path: str) -> Response:
        """That of one of ``PATHS``."""
        document, page, headers = await run_in_threadpool(lambda: self._made)
        if path == "/docs":
            return HTMLResponse(page, headers=headers)
        return Response(document, media_type="application/json")

    @cached_property
    def _made(self) -> tuple[bytes, str, dict[str, str]]:
        from gateway.api import reference

        document = reference.document()
        return bytes(JSONResponse(document).body), reference.page(document), reference.HEADERS
