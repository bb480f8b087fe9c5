"""Let a server count the prompt of a request after the request has ended, if its settlement needs that count.

The rules: the client has disconnected, or its response cannot be completed. A count takes at most ``SECONDS``. Without a count, the request
is settled by an estimate, or for nothing.
"""

from __future__ import annotations

from time import monotonic

import orjson

from gateway.api.strict_json import parse
from gateway.api.vllm.prompt_count import Document, exact_request, read_count, tokenize_request
from gateway.proxy.json_body import JsonBody
from gateway.proxy.request_services import RequestServices
from gateway.proxy.upstream_request import UpstreamRequest
from upstream.balancing.server import Server
from upstream.balancing.side_requests import SideRequests
from upstream.http.errors import UpstreamError

SECONDS = 1.0
"""Seconds for the count of one prompt, the wait for other counts included. Its deadline may be late by one tick of ``Deadlines``."""
LARGEST = 4 * 1024 * 1024
"""Bytes of a body whose prompt is counted. A larger one, mostly of media, is estimated."""


async def count_prompt(upstream: UpstreamRequest, server: Server, worker: RequestServices) -> int | None:
    """Return the tokens of the prompt as this server counts them; None if it cannot count this body, or not in time."""
    expires = monotonic() + SECONDS
    messages = await _count_messages(upstream, server, worker)
    counted = None
    for path, message in messages:
        try:
            status, content = await worker.side_requests.post(server, path, message, expires - monotonic())
        except UpstreamError:
            break
        if status == 200 and (counted := read_count(content)) is not None:
            break
    outcome = "unsupported" if not messages else "failed" if counted is None else "counted"
    worker.metrics.cells("prompt_counts_total", upstream.model.model.base, outcome)[0] += 1
    return counted


async def _count_messages(upstream: UpstreamRequest, server: Server, worker: RequestServices) -> list[tuple[str, bytes]]:
    """Return the requests that may count the prompt, the most exact first: each with its path and its bytes."""
    body, side_requests = upstream.body, worker.side_requests
    if not isinstance(body, JsonBody) or len(body.content) > LARGEST:
        return []
    name = upstream.model.model.served or server.spec.model
    if not body.content:
        return _serialized(body.path, body.document, name, server, side_requests)
    async with worker.steps.admit(len(body.content)) as pace:
        return _serialized(body.path, await pace.run(parse(body.content)), name, server, side_requests)


def _serialized(path: str, document: Document, model: str, server: Server, side_requests: SideRequests) -> list[tuple[str, bytes]]:
    requests = (exact_request(path, document), tokenize_request(path, document))
    return [
        (each.path, orjson.dumps({**each.body, "model": model}))
        for each in requests
        if each is not None and side_requests.may_serve(server, each.path)
    ]
