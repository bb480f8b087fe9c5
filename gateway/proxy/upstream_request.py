"""The request that a server gets.

The rule: none of the client's headers is passed on. The gateway writes the headers from what it knows: the server's own key, the request
ID, the trace, and the type of a body that was checked.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import ClassVar
from zlib import crc32

import msgspec
import orjson

from gateway.api.media_urls import InlineMedia
from gateway.api.routes import OUTPUTS
from gateway.api.translation import Translation
from gateway.api.vllm.choices import choices_and_prompts
from gateway.auth.catalog import CatalogEntry
from gateway.client.request import ClientRequest
from gateway.continuation.plan import Plan
from gateway.limits.estimate import estimate, stated_limit
from gateway.prompts.token_keys import TokenRequest
from gateway.proxy.form import Form, NextBytes
from gateway.proxy.json_body import JsonBody
from gateway.system.steps import MEDIUM
from upstream.balancing.attempt import Upload
from upstream.balancing.policies.policy import NO_FACTS, RequestFacts
from upstream.balancing.server import Server

_ENDING = 64 * 1024
"""Bytes of a large request that its fingerprint reads: messages differ at their end."""


class FormBody(msgspec.Struct, frozen=True):
    """A form that has been read and checked up to its model, or to its end."""

    form: Form
    path: str
    input_field: str
    upload: Upload | None
    """Streams the rest, in chunks: its length is not known before it is written. None if the whole form has been read."""
    headers: ClassVar[bytes] = b""
    translation: ClassVar[Translation | None] = None
    choices: ClassVar[int] = 0
    prompts: ClassVar[int] = 0
    hides_running_usage: ClassVar[bool] = False
    content: ClassVar[bytes] = b""

    @classmethod
    def of(cls, form: Form, request: ClientRequest) -> FormBody:
        """Build the body from a request's form."""
        route, upload = request.target.route, None if form.ended else partial(_upload, form, request.body.read_piece)
        return cls(form, route.upstream, route.input_field, upload)

    def encode(self, served_model: str) -> bytes:
        """Return the form, or the chunk with its first part, for a server that knows the model by this name."""
        opening = self.form.opening(served_model)
        return opening if self.upload is None else _chunk(opening)

    @property
    def content_type(self) -> bytes:
        """The Content-Type header."""
        return self.form.content_type

    def sent_document(self) -> None:
        """Return None: a form has no document."""

    @property
    def hides_usage(self) -> bool:
        """Whether the usage event of a stream is for the gateway alone; known once the form has been read."""
        return self.form.hides_usage


async def _upload(form: Form, next_bytes: NextBytes, send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
    """Stream what follows a form's opening. The server gets the end once the whole form has been checked."""
    while data := await next_bytes():
        if written := form.feed(data):
            send(_chunk(written), True)
        if not await drained():
            return
    send(_chunk(form.ending()) + b"0\r\n\r\n", False)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class UpstreamRequest(msgspec.Struct, frozen=True, eq=False):
    """One request for the servers of one model.

    ``name`` is the model's name as the client sent it. ``facts`` is what the model's balance policy needs to know about the request.
    ``tokens``: how to get the token IDs of its prompt, if the policy can use them. ``plan``: how its stream would be continued on another
    server; None if it would not. ``runs_tools``: the server may call tools for it, so it must not be sent again.
    """

    request: ClientRequest
    model: CatalogEntry
    name: str
    body: JsonBody | FormBody
    facts: RequestFacts = NO_FACTS
    tokens: TokenRequest | None = None
    plan: Plan | None = None
    runs_tools: bool = False

    def estimate_prompt(self) -> int:
        """Estimate the tokens of the prompt, for a request that no limit has estimated."""
        body = self.body
        if isinstance(body, FormBody):
            return 1
        size = len(body.content or orjson.dumps(body.document))
        return estimate({}, body.path, size, body.media if size <= MEDIUM else InlineMedia()).prompt

    @property
    def most_output(self) -> float:
        """The tokens that the output may have; infinity without a limit, or if the body is only stored as bytes."""
        body = self.body
        if isinstance(body, FormBody) or body.content or (output := OUTPUTS.get(body.path)) is None:
            return math.inf
        most = stated_limit(body.document, output)
        return math.inf if most is None else most * math.prod(choices_and_prompts(body.document))

    def fingerprint(self) -> int:
        """Return a number of the request, from its size and its end. A client's retry has it too; other requests hardly ever do."""
        body, size = self.body, self.request.body.size
        if isinstance(body, FormBody):
            return size
        return crc32(memoryview(body.content or orjson.dumps({**body.document, "model": self.name}))[-_ENDING:], size)

    def compose(self, server: Server, content: bytes | None = None, path: str | None = None) -> tuple[bytes, bytes]:
        """Return the headers and the body, or its first part, for one server. ``content``, ``path``: to continue a response."""
        request, body, trace = self.request, self.body, self.request.trace
        content = content or body.encode(self.model.model.served or server.spec.model)
        framing = b"content-length: %d\r\n" % len(content) if body.upload is None else b"transfer-encoding: chunked\r\n"
        headers = b"%bcontent-type: %b\r\nx-request-id: %b\r\n%b%b%b\r\n" % (
            server.request_head(path or body.path), body.content_type, request.id.encode(), body.headers, framing,
            b"" if trace is None else trace.header,
        )  # fmt: skip
        return headers, content
