"""The request that a server gets.

The rule: none of the client's headers is passed on. The gateway writes the headers from what it knows: the server's own key, the request
ID, the trace, and the type of a body that was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec
import orjson

from gateway.api.settlement import BYTES_PER_TOKEN
from gateway.api.translation import Translation
from gateway.auth.catalog import CatalogEntry
from gateway.client.request import ClientRequest
from gateway.limits.estimate import estimate
from gateway.prompts.token_keys import TokenRequest
from gateway.proxy.body import JsonBody
from gateway.proxy.form import Form
from gateway.system.steps import MEDIUM
from upstream.balancing.attempt import Upload
from upstream.balancing.policies.policy import NO_FACTS, RequestFacts
from upstream.balancing.server import Server


class FormBody(msgspec.Struct, frozen=True):
    """A form whose first part has been read and checked. The rest is checked while it is uploaded."""

    form: Form
    path: str
    input_field: str
    encode: Callable[[str], bytes]
    """Returns the first part for a server that knows the model by this name."""
    upload: Upload
    """Streams the rest."""
    remaining: int | None
    """Number of bytes that are uploaded after the first part; None if it is not known."""
    headers: ClassVar[bytes] = b""
    translation: ClassVar[Translation | None] = None
    choices: ClassVar[int] = 0
    prompts: ClassVar[int] = 0
    hides_running_usage: ClassVar[bool] = False
    content: ClassVar[bytes] = b""

    @classmethod
    def of(cls, form: Form, request: ClientRequest) -> FormBody:
        """Build the body from a request's form.

        Its length is known only if the whole form has been read, since the gateway may add fields at its end.
        """
        length, route = request.head.content_length, request.target.route
        chunked = length is None or not form.ended
        return cls(
            form,
            route.upstream,
            route.input_field,
            form.opening_chunk if chunked else form.opening,
            form.upload(request.body.read_piece, chunked=chunked),
            None if chunked or length is None else form.remaining(length),
        )

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


class UpstreamRequest(msgspec.Struct, frozen=True, eq=False):
    """One request for the servers of one model.

    ``name`` is the model's name as the client sent it. ``facts`` is what the model's balance policy needs to know about the request.
    ``tokens``: how to get the token IDs of its prompt, if the policy can use them.
    """

    request: ClientRequest
    model: CatalogEntry
    name: str
    body: JsonBody | FormBody
    facts: RequestFacts = NO_FACTS
    tokens: TokenRequest | None = None

    def estimate_prompt(self) -> int:
        """Estimate the tokens of the prompt, for a request that no limit has estimated."""
        body = self.body
        if isinstance(body, FormBody):
            return 1
        content = body.content or orjson.dumps(body.document)
        if len(content) > MEDIUM:
            return len(content) // BYTES_PER_TOKEN  # parsing it again would delay other clients
        return estimate(body.sent_document(), body.path, content).prompt

    def compose(self, server: Server) -> tuple[bytes, bytes]:
        """Return the headers and the body, or the first part of a body that is uploaded, for one server."""
        request, body = self.request, self.body
        content, remaining, trace = body.encode(self.model.model.served or server.spec.model), body.remaining, request.trace
        framing = b"transfer-encoding: chunked\r\n" if remaining is None else b"content-length: %d\r\n" % (len(content) + remaining)
        headers = b"%bcontent-type: %b\r\nx-request-id: %b\r\n%b%b%b\r\n" % (
            server.request_head(body.path), body.content_type, request.id.encode(), body.headers, framing,
            b"" if trace is None else trace.header,
        )  # fmt: skip
        return headers, content
