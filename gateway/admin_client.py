"""The other end of the admin socket: how a command asks the gateway that runs with a configuration.

The rule: what can go wrong is one sentence for the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

_CONNECT = 5.0  # seconds; an operation itself may take as long as a model's start


class UnreachableError(Exception):
    """No gateway answers."""


class RefusedError(Exception):
    """The gateway does not do it; the text is its own."""


class AdminClient:
    """A conversation with a running gateway."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def status(self) -> dict[str, Any]:
        """What /status shows."""
        return self._answer("GET", "/status")

    def operate(self, operation: str, model: str) -> dict[str, Any]:
        """Have something done to a model; returns the model's entry in the status. Raises RefusedError."""
        return self._answer("POST", f"/models/{quote(model)}/{operation}")

    def reload(self) -> dict[str, Any]:
        """Have the configuration read; returns what came of it as /status shows it. Raises RefusedError."""
        return self._answer("POST", "/reload")

    def _answer(self, method: str, path: str) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path)
        except httpx2.HTTPError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error
        document: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            raise RefusedError(document["error"])
        return document


@contextmanager
def admin_client(path: Path) -> Iterator[AdminClient]:
    """Ask over the socket at ``path``. Every call raises UnreachableError where nobody answers."""
    transport = httpx2.HTTPTransport(uds=str(path), trust_env=False, verify=False)
    timeout = httpx2.Timeout(None, connect=_CONNECT)
    headers = {"accept": "application/json"}
    with httpx2.Client(transport=transport, base_url="http://gateway", timeout=timeout, headers=headers, trust_env=False) as client:
        yield AdminClient(client)
