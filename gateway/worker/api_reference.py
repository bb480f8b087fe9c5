"""Serves the API reference on the data port, if the configuration has ``server.docs``.

The rule: the first request for it builds it, in a thread, and it is stored. A worker without such a request neither loads nor holds it.
"""

from __future__ import annotations

from functools import cached_property

from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response

PATHS = frozenset({"/docs", "/openapi.json"})


class ApiReference:
    """The two pages of one worker."""

    async def page(self, path: str) -> Response:
        """Return the page at one of ``PATHS``."""
        document, page, headers = await run_in_threadpool(lambda: self._pages)
        if path == "/docs":
            return HTMLResponse(page, headers=headers)
        return Response(document, media_type="application/json")

    @cached_property
    def _pages(self) -> tuple[bytes, str, dict[str, str]]:
        from gateway.api import reference

        document = reference.document()
        return bytes(JSONResponse(document).body), reference.page(document), reference.HEADERS
