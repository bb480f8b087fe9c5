"""The client of the admin API, over the admin socket or over the admin port with its token.

The rule: every error is one sentence for the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2

_NO_CONTENT = 204
_CONNECT = 5.0  # seconds; an operation itself may take as long as a model's start


class UnreachableError(Exception):
    """No gateway responds."""


class RefusedError(Exception):
    """The gateway refused the request. The text is its explanation."""


class AdminClient:
    """Sends requests to a running gateway."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def status(self) -> dict[str, Any]:
        """Return the JSON of /status."""
        return self.send("GET", "/status")

    def read(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the response to a query. Its numbers with decimals are ``Decimal``, so that costs keep all of their digits."""
        return self.send("GET", path, query, parse_float=Decimal)

    def send(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, parse_float: Callable[[str], Any] = float, **more: Any
    ) -> dict[str, Any]:
        """Send a request; ``more`` is for httpx2. Returns the JSON object of the response, empty if there is no content.

        Raises RefusedError, and UnreachableError for a response that is not a gateway's.
        """
        try:
            response = self._client.request(method, path, params=query, **more)
        except httpx2.HTTPError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error
        if response.status_code == _NO_CONTENT:
            return {}
        try:
            document = response.json(parse_float=parse_float)
        except ValueError:
            document = None
        if not isinstance(document, dict) or not (response.is_success or isinstance(document.get("error"), str)):
            raise UnreachableError("this is not the admin port of a gateway")
        if not response.is_success:
            raise RefusedError(document["error"])
        return document


@contextmanager
def admin_client(path: Path) -> Iterator[AdminClient]:
    """Connect to the socket at ``path``. Every call raises UnreachableError if no gateway responds."""
    with _client("http://gateway", transport=httpx2.HTTPTransport(uds=str(path), trust_env=False, verify=False)) as client:
        yield AdminClient(client)


@contextmanager
def remote_admin_client(url: str, token: str | None) -> Iterator[AdminClient]:
    """Connect to the admin port at ``url``, as ``admin_client`` does. Raises UnreachableError for an invalid URL.

    With https, the authorities in the file that SSL_CERT_FILE names replace the usual ones.
    """
    try:
        made = _client(url, token)
    except (httpx2.InvalidURL, ValueError, OSError) as error:
        raise UnreachableError(str(error)) from error
    with made as client:
        yield AdminClient(client)


def _client(url: str, token: str | None = None, transport: httpx2.BaseTransport | None = None) -> httpx2.Client:
    headers = {"accept": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    timeout = httpx2.Timeout(None, connect=_CONNECT)
    verify = httpx2.create_ssl_context() if transport is None else False
    return httpx2.Client(transport=transport, base_url=url, timeout=timeout, headers=headers, verify=verify, trust_env=False)
