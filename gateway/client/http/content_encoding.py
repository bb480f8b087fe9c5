"""Request bodies with a Content-Encoding (RFC 9110, section 8.4), decoded in steps.

Owns which encodings are accepted and what decoding may cost. The rules: a step produces at most ``_STEP`` bytes. Decoding stops when the
result exceeds the body limit or ``_MAX_RATIO`` times the size of the compressed body. A body is exactly one gzip member or zstd frame;
data after it is refused.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

from gateway.api.errors import Refusal

_STEP = 256 * 1024  # bytes
_PIECE = 64 * 1024  # bytes that are fed to a decoder at once
_MAX_RATIO = 100
_LITTLE = 1024 * 1024  # bytes that a body may decode to regardless of the ratio
_MAX_WINDOW_LOG = 23  # 8 MiB, the limit of RFC 9659 for zstd as a content encoding
_GZIP = 16 + zlib.MAX_WBITS  # inflateInit2 in zlib.h


class _Decoder(Protocol):
    """The interface of the decompressors in bz2, lzma and zstd."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """A decoder of one gzip member (RFC 1952)."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(_GZIP)
        self.eof, self.needs_input, self.unused_data = False, True, b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        decoder = self._decoder
        made = decoder.decompress(data or decoder.unconsumed_tail, max_length)
        self.eof, self.unused_data = decoder.eof, decoder.unused_data
        self.needs_input = not decoder.unconsumed_tail and len(made) < max_length
        return made


def _gzip() -> tuple[_Decoder, type[Exception]]:
    return _Gzip(), zlib.error


def _zstd() -> tuple[_Decoder, type[Exception]]:
    """Return a decoder of one zstd frame (RFC 8878) without a dictionary."""
    if sys.version_info >= (3, 14):  # loaded with the first body that needs it
        from compression import zstd
    else:
        from backports import zstd
    library: Any = zstd
    return library.ZstdDecompressor(options={library.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}), library.ZstdError


_DECODERS: Mapping[str, Callable[[], tuple[_Decoder, type[Exception]]]] = {"gzip": _gzip, "zstd": _zstd}
_INVALID: Mapping[str, str] = {
    "gzip": "The body is not valid gzip data.",
    "zstd": "The body is not a valid zstd frame, or needs a dictionary or a window of more than 8 MiB.",
}

IDENTITY = "identity"
ENCODINGS = (*_DECODERS, IDENTITY)
"""The values of Content-Encoding that are accepted."""


def decoded(
    body: bytes | bytearray, encoding: str, limit: int, hold: Callable[[int], None] = lambda _: None
) -> Generator[None, None, bytes | bytearray]:
    """Decode a whole body, in steps. ``hold`` is called with the bytes held so far before each further step.

    Raises Refusal invalid_request for invalid data, and request_too_large beyond ``limit`` bytes or the ratio.
    """
    decoder, broken = _DECODERS[encoding]()
    most = min(limit, max(_LITTLE, _MAX_RATIO * len(body)))
    result, fed = bytearray(), 0
    try:
        while not decoder.eof:
            if decoder.needs_input and fed == len(body):
                raise Refusal("invalid_request", f"The body ends before its {encoding} data does.")
            piece = bytes(body[fed : fed + _PIECE]) if decoder.needs_input else b""
            fed += len(piece)
            result += decoder.decompress(piece, _STEP)
            if len(result) > limit:
                raise Refusal("request_too_large", f"The decoded body is larger than {limit} bytes.")
            if len(result) > most:
                raise Refusal("request_too_large", f"The decoded body is more than {_MAX_RATIO} times as large as what was sent.")
            hold(len(body) + len(result))
            yield
    except broken:
        raise Refusal("invalid_request", _INVALID[encoding]) from None
    if decoder.unused_data or fed < len(body):
        raise Refusal("invalid_request", f"The body has data after its {encoding} data. It must be one gzip member or zstd frame.")
    return result
