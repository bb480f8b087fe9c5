"""Serves the API reference on the data port, if the configuration has ``server.docs``.

The rule: the first request for it builds it, in a thread, and it is stored. A worker without such a request neither loads nor holds it.
"""

from __future__ import annotations

from functools import cached_property

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

PATHS = frozenset({"/docs", "/openapi.json"})


class ApiReference:
    """The two pages of one worker."""

    async def page(self, path: str) -> Response:
        """Return the page at one of ``PATHS``."""
        return (await run_in_threadpool(lambda: self._pages))[path]

    @cached_property
    def _pages(self) -> dict[str, Response]:
        from gateway.api import reference

        document = reference.document()
        return {"/openapi.json": JSONResponse(document), "/docs": reference.page(document)}
