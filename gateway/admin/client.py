"""The other end of the admin API: how a command asks a gateway, over its socket or over its port with the token.

The rule: what can go wrong is one sentence for the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def usage(self, words: Mapping[str, str]) -> dict[str, Any]:
        """What /usage answers to a question. Raises RefusedError."""
        return self._answer("GET", "/usage", words)

    def keys(self) -> dict[str, Any]:
        """What /keys shows."""
        return self._answer("GET", "/keys")

    def operate(self, operation: str, model: str) -> dict[str, Any]:
        """Have something done to a model; returns the model's entry in the status. Raises RefusedError."""
        return self._answer("POST", f"/models/{quote(model)}/{operation}")

    def reload(self) -> dict[str, Any]:
        """Have the configuration read; returns what came of it as /status shows it. Raises RefusedError."""
        return self._answer("POST", "/reload")

    def drain(self) -> dict[str, Any]:
        """Have the gateway stop as at a SIGTERM. Raises RefusedError."""
        return self._answer("POST", "/drain")

    def _answer(self, method: str, path: str, words: Mapping[str, str] | None = None) -> dict[str, Any]:
        try:
            answer = self._client.request(method, path, params=words)
        except httpx2.HTTPError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error
        document = _document(answer)
        if not answer.is_success:
            raise RefusedError(document["error"])
        return document


def _document(answer: httpx2.Response) -> dict[str, Any]:
    """What a gateway answers: a mapping, which of an error has words. Raises UnreachableError for anything else."""
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, dict) or not (answer.is_success or isinstance(document.get("error"), str)):
        raise UnreachableError("what answers there is no gateway's admin port")
    return document


@contextmanager
def admin_client(path: Path) -> Iterator[AdminClient]:
    """Ask over the socket at ``path``. Every call raises UnreachableError where nobody answers."""
    transport = httpx2.HTTPTransport(uds=str(path), trust_env=False, verify=False)
    timeout = httpx2.Timeout(None, connect=_CONNECT)
    headers = {"accept": "application/json"}
    with httpx2.Client(transport=transport, base_url="http://gateway", timeout=timeout, headers=headers, trust_env=False) as client:
        yield AdminClient(client)


@contextmanager
def remote_admin_client(url: str, token: str | None) -> Iterator[AdminClient]:
    """As ``admin_client``, over the admin port at ``url``. Raises UnreachableError for what is no URL."""
    headers = {"accept": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
    timeout = httpx2.Timeout(None, connect=_CONNECT)
    try:
        made = httpx2.Client(base_url=url, timeout=timeout, headers=headers, trust_env=False)
    except (httpx2.InvalidURL, ValueError) as error:
        raise UnreachableError(str(error)) from error
    with made as client:
        yield AdminClient(client)
