"""The request as a server gets it: head and body, written afresh.

The rule: nothing of the client's headers is passed on but what is named here. The head says only what the
gateway knows: the server's own key, our request id, and the type of a body that was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from gateway.api.translation import Translation
from gateway.auth.catalog import CatalogEntry
from gateway.client.request import ClientRequest
from gateway.proxy.body import Document, Prepared
from gateway.proxy.form import Form
from upstream.balancing.attempt import Upload
from upstream.balancing.policies.policy import NO_FACTS, RequestFacts
from upstream.balancing.server import Server


class Outbound(msgspec.Struct):
    """What is to be sent. ``name`` is the model in the client's words; ``composed_at`` when it was first written;
    ``facts`` is what the model's balance policy requires to know of the request."""

    call: ClientRequest
    entry: CatalogEntry
    name: str
    encode: Callable[[str], bytes]
    content_type: bytes
    path: str
    input_field: str
    hides_usage: bool = False
    translation: Translation | None = None
    upload: Upload | None = None
    behind: int | None = 0
    """Bytes of the body that are uploaded behind what is encoded; None where nobody knows."""
    composed_at: float | None = None
    facts: RequestFacts = NO_FACTS
    form: Form | None = None
    """What the upload is read from."""
    more_head: bytes = b""
    """Lines of the head that belong to this request alone."""
    document: Document | None = None
    """The JSON body as it was sent; a server's error is explained by it."""

    @classmethod
    def of_json(cls, call: ClientRequest, entry: CatalogEntry, name: str, prepared: Prepared) -> Outbound:
        """A JSON body that was checked."""
        return cls(
            call,
            entry,
            name,
            prepared.encode,
            b"application/json",
            prepared.upstream,
            prepared.input_field,
            prepared.hides_usage,
            prepared.translation,
            more_head=prepared.more_head,
            document=prepared.document,
        )

    @classmethod
    def of_form(cls, call: ClientRequest, entry: CatalogEntry, name: str, form: Form) -> Outbound:
        """A form whose beginning was checked; the rest is checked as it streams. How long that will be is known only where all of it
        has been read, since the gateway may add to its end."""
        length = call.head.headers.get(b"content-length")
        chunked = length is None or not form.ended
        encode = form.opening_chunk if chunked else form.opening
        upload = form.upload(call.body.read_piece, chunked=chunked)
        return cls(
            call,
            entry,
            name,
            encode,
            form.content_type,
            call.target.route.upstream,
            call.target.route.input_field,
            upload=upload,
            behind=None if chunked or length is None else form.behind(int(length)),
            form=form,
        )

    def encode_at_once(self, prepared: Prepared) -> int:
        """Write a large body now, so that its document need not be kept. Returns the number of its bytes."""
        servers = self.entry.pool.servers
        encoded = prepared.encoded(self.entry.model.served or (servers[0].spec.model if servers else self.entry.model.id))
        self.encode = encoded.encode
        return len(encoded.body)

    def compose(self, server: Server) -> tuple[bytes, bytes]:
        """Head and body, or the body's beginning, for one server."""
        body = self.encode(self.entry.model.served or server.spec.model)
        behind = self.behind
        framing = b"transfer-encoding: chunked\r\n" if behind is None else b"content-length: %d\r\n" % (len(body) + behind)
        trace = self.call.trace
        head = b"%bcontent-type: %b\r\nx-request-id: %b\r\n%b%b%b\r\n" % (
            server.request_head(self.path), self.content_type, self.call.id.encode(), self.more_head, framing,
            b"" if trace is None else trace.header,
        )  # fmt: skip
        if self.composed_at is None:
            self.composed_at = monotonic()
        return head, body
