"""Requests to an identity provider: its metadata, its JWKS, and the exchange of a code.

The rules: the last valid metadata and JWKS are used while the provider does not send others. An unknown key leads to a new request, but
only every few seconds, because unauthenticated clients can cause it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.auth.jwks import KeySetError, VerificationKeys, verification_keys
from gateway.auth.provider_request import request
from gateway.sign_in.errors import SignInError, UnknownKeyError
from gateway.sign_in.oidc.provider import Client, Metadata, id_token_of, metadata_url, parsed_metadata, token_request

_FRESH = 600.0  # seconds for which metadata and JWKS are used
_MIN_INTERVAL = 5.0  # seconds between two requests for the same document
_UNREACHABLE = "The identity provider does not respond. Try again later."
T = TypeVar("T")
V = TypeVar("V")


@dataclass(slots=True)
class _Document(Generic[T]):
    """A document and when it was requested, in seconds of the monotonic clock."""

    value: T | None = None
    requested: float = float("-inf")


class ProviderClient:
    """The provider of one issuer. ``client`` is the gateway as its client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._metadata: _Document[Metadata] = _Document()
        self._keys: _Document[VerificationKeys] = _Document()
        self._lock = asyncio.Lock()

    async def metadata(self) -> Metadata:
        """Return the provider's metadata. Raises SignInError if it has never been valid."""
        async with self._lock:
            issuer = self.client.issuer
            return await self._current(self._metadata, _FRESH, metadata_url(issuer), lambda document: parsed_metadata(document, issuer))

    async def exchange(self, code: str, verifier: str, redirect_uri: str) -> str:
        """Exchange a code for an ID token. Raises SignInError."""
        exchange = token_request(self.client, await self.metadata(), code, verifier, redirect_uri)
        return id_token_of(*await self._send("POST", exchange.url, exchange.headers, exchange.body))

    async def verified(self, verify: Callable[[VerificationKeys], V]) -> V:
        """Return what ``verify`` returns for the provider's keys, which are requested again if it does not find a key.

        Raises SignInError.
        """
        try:
            return verify(await self._verification_keys(_FRESH))
        except UnknownKeyError:
            return verify(await self._verification_keys(_MIN_INTERVAL))

    async def _verification_keys(self, fresh: float) -> VerificationKeys:
        url = (await self.metadata()).jwks_uri
        async with self._lock:
            return await self._current(self._keys, fresh, url, self._parsed_keys)

    async def _current(self, known: _Document[T], fresh: float, url: str, parse: Callable[[bytes], T]) -> T:
        """Return a document that was requested within ``fresh`` seconds, or the last valid one. Raises SignInError without any."""
        now = time.monotonic()
        if known.value is not None and now - known.requested < fresh:
            return known.value
        known.requested = now
        try:
            status, body = await self._send("GET", url, {"accept": "application/json"})
            if status != 200:
                raise SignInError(_UNREACHABLE, detail=f"{url} responded with status {status}", status=502)
            known.value = parse(body)
        except SignInError:
            if known.value is None:
                raise
        return known.value

    def _parsed_keys(self, document: bytes) -> VerificationKeys:
        try:
            return VerificationKeys(verification_keys(document), self.client.algorithms)
        except KeySetError as error:
            raise SignInError(_UNREACHABLE, detail=f"the JWKS {error}", status=502) from None

    async def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Send a request, and return the status and body of the response. Raises SignInError."""
        try:
            response, received = await request(method, url, headers, body, self.client.ca)
        except OSError as error:
            raise SignInError(_UNREACHABLE, detail=f"{url}: {str(error) or type(error).__name__}", status=502) from error
        return response.status_code, received
