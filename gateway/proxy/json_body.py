"""A JSON body that may be sent, and its bytes.

The rule: the gateway sends the document that was checked, serialized again. The client's own bytes are never sent. So the server gets
exactly the authorized content, whatever the text contains (duplicate keys, escapes, byte order marks).
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import orjson
from msgspec import field
from msgspec.structs import replace

from gateway.api.media_urls import InlineMedia
from gateway.api.strict_json import Document
from gateway.api.translation import Translation


class JsonBody(msgspec.Struct, frozen=True):
    """A JSON body that may be sent; only the model's name at the server is still to be set.

    ``hides_usage``: the usage event of the stream is for the gateway alone. ``choices`` and ``prompts``: of a stream with running usage,
    the number of choices for each prompt and of prompts, otherwise 0; ``hides_running_usage``: that usage is for the gateway alone.
    ``path``: the path at the server. ``input_field``: the field that holds the text. ``translation``: translates the response to a request
    in an older form. ``headers``: header lines of this request.
    """

    document: Document
    """Empty once the body is serialized."""
    stream: bool
    hides_usage: bool
    path: str
    input_field: str
    translation: Translation | None = None
    headers: bytes = b""
    choices: int = 0
    prompts: int = 0
    hides_running_usage: bool = False
    media: InlineMedia = field(default_factory=InlineMedia)
    content: bytes = b""
    """The serialized body of a large request, with ``model`` as its first field."""
    content_model: str = ""
    """The model's name in ``content``."""
    content_type: ClassVar[bytes] = b"application/json"
    upload: ClassVar[None] = None

    def encode(self, served_model: str) -> bytes:
        """Return the bytes for a server that knows the model by this name."""
        if not self.content:
            self.document["model"] = served_model
            return orjson.dumps(self.document)
        if served_model == self.content_model:
            return self.content
        old, new = (orjson.dumps({"model": name})[:-1] for name in (self.content_model, served_model))
        return b"".join((new, memoryview(self.content)[len(old) :]))

    def serialized(self, served_model: str) -> JsonBody:
        """Return the same body with its bytes in place of the document, which takes many times as much memory."""
        rest = {name: value for name, value in self.document.items() if name != "model"}
        return replace(self, document={}, content=orjson.dumps({"model": served_model, **rest}), content_model=served_model)

    def sent_document(self) -> Document:
        """Return the document of the request. Parses a serialized body again."""
        return orjson.loads(self.content) if self.content else self.document
