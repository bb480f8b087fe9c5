"""Send a request to an identity provider: for its metadata, its JWKS, or a code.

The rules: a response is bounded in time and size, and no redirect is followed. The proxy of the environment is used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import httpx2

_TIMEOUT = 10.0  # seconds for a whole response
_MAX_SIZE = 1 << 20  # bytes of a response


class ProviderError(OSError):
    """A provider does not respond as expected. The text explains why."""


async def request(
    method: str, url: str, headers: Mapping[str, str], body: bytes = b"", ca: Path | str | None = None
) -> tuple[httpx2.Response, bytes]:
    """Return the response and its body. Raises OSError, whose text may be empty for a provider that does not respond in time.

    ``ca`` is a file with the trusted certificate authorities; None: use the system's authorities.
    """
    import httpx2  # loaded only where a provider is configured

    trust = True if ca is None else ssl.create_default_context(cafile=ca)
    received = b""
    try:
        async with (
            asyncio.timeout(_TIMEOUT),
            httpx2.AsyncClient(verify=trust, timeout=_TIMEOUT, follow_redirects=False) as client,
            client.stream(method, url, headers=headers, content=body or None) as response,
        ):
            async for part in response.aiter_bytes():
                received += part
                if len(received) > _MAX_SIZE:
                    raise ProviderError(f"its response is larger than {_MAX_SIZE} bytes")
            return response, received
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, ImportError) as error:  # the last two: a proxy of an unknown kind
        raise ProviderError(str(error) or type(error).__name__) from error
