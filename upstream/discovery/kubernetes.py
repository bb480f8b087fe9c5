"""Kubernetes: the EndpointSlices of a service, by list and watch, from inside a pod.

One list of the slices, then a watch of changes, resumed where it ended (Kubernetes API concepts, "Efficient detection of changes"). The
rules: a version that the server no longer knows (410) means a new list, and the last endpoints stay until then. The token is read for each
request, because it is replaced while the pod runs.

Two GETs on one resource do not need a client library. The existing libraries add a second HTTP client (lightkube and kr8s: httpx;
kubernetes_asyncio: aiohttp and 10 MB of generated classes).
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upstream.backoff import Backoff
from upstream.discovery.endpoints import Observation, name_of, observed

if TYPE_CHECKING:
    import httpx2

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with ``token``, ``ca.crt`` and ``namespace`` (Kubernetes documentation, "Accessing the API from within a Pod")."""
WATCH = 60.0
"""Seconds after which a watch ends and is resumed, so that a broken connection is noticed."""
LINE_LIMIT = 8 << 20
"""Bytes of one event. A slice has at most 1,000 endpoints, and etcd stores at most 1.5 MiB."""
_RESPONSE = 10.0  # seconds for a connection, and for the start of a response
_PAUSES = 0.5, 30.0  # seconds after the first failure, and at most
_MESSAGE = 300  # characters of a message of the API server
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A service by name. ``namespace``: None for the pod's own; ``port``: number or name of its endpoints' port, None for the only port."""

    name: str
    namespace: str | None = None
    port: int | str | None = None

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"kubernetes {name}" + (f":{self.port}" if self.port is not None else "")


class DiscoveryError(Exception):
    """The request to the API server failed, or its response was invalid. The text says why."""


class VersionExpiredError(Exception):
    """The API server no longer knows the version from which the watch was to resume (410)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The API server of a pod. ``host``: empty outside a cluster. ``folder``: with the service account's files."""

    host: str
    port: str
    folder: Path = SERVICE_ACCOUNT

    @classmethod
    def of(cls, environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Cluster:
        """Read the address from the environment of a pod."""
        return cls(environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443"), folder)

    @property
    def base_url(self) -> str:
        return f"https://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def client(self) -> httpx2.AsyncClient:
        """Return a client that trusts only the cluster's authority. Raises DiscoveryError."""
        import httpx2  # loaded only where a service is watched

        if not self.host:
            raise DiscoveryError("not in a pod of a cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            trust = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise DiscoveryError(f"{self.folder / 'ca.crt'}: {error}") from error
        timeout = httpx2.Timeout(_RESPONSE, read=WATCH + _RESPONSE)
        return httpx2.AsyncClient(base_url=self.base_url, verify=trust, timeout=timeout, trust_env=False)

    def read(self, name: str) -> str:
        """Read a file of the service account. Raises DiscoveryError."""
        try:
            return (self.folder / name).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"{self.folder / name}: {getattr(error, 'strerror', None) or error}") from error


async def watch(source: Service, cluster: Cluster, on_endpoints: Callable[[Observation], None], on_failure: Callable[[str], None]) -> None:
    """Report endpoints and failures until cancelled."""
    follower, backoff = _Follower(source, cluster, on_endpoints), Backoff(*_PAUSES)
    while True:
        try:
            await follower.follow()
        except DiscoveryError as error:
            on_failure(str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            on_failure(f"invalid response of the API server ({type(error).__name__}: {error})")
            follower.version = None
        if follower.progressed:
            backoff.reset()
        follower.progressed = False
        await asyncio.sleep(backoff.next_pause())


class _Follower:
    """The state of one service.

    ``version``: from which the watch resumes, None before a list. ``progressed``: a response or event arrived.
    """

    def __init__(self, source: Service, cluster: Cluster, on_endpoints: Callable[[Observation], None]) -> None:
        self._source = source
        self._cluster = cluster
        self._on_endpoints = on_endpoints
        self._slices: dict[str, Mapping[str, Any]] = {}  # by name
        self.version: str | None = None
        self.progressed = False

    async def follow(self) -> None:
        """List the slices if needed, then watch until a failure. Raises DiscoveryError."""
        import httpx2

        try:
            async with self._cluster.client() as client:
                if self.version is None:
                    await self._list(client)
                while await self._watch(client):
                    self.progressed = True
        except VersionExpiredError:
            _log.debug("%s: listing again", self._source)
            self.version = None
        except (httpx2.HTTPError, TimeoutError) as error:
            raise DiscoveryError(f"the API server at {self._cluster.base_url}: {str(error) or type(error).__name__}") from error

    async def _list(self, client: httpx2.AsyncClient) -> None:
        async with asyncio.timeout(2 * _RESPONSE), self._get(client) as response:
            document = json.loads(await response.aread())
        self._slices = {name_of(each): each for each in document["items"]}
        self.version = str(document["metadata"]["resourceVersion"])
        self._report()

    async def _watch(self, client: httpx2.AsyncClient) -> bool:
        """Watch once, and return whether the watch ended in good order after at least a second. Raises VersionExpiredError."""
        import httpx2

        began = asyncio.get_running_loop().time()
        seconds = str(int(WATCH * random.uniform(0.8, 1.0)))  # noqa: S311 - spreads load, no secret
        version = str(self.version)
        async with self._get(client, watch="1", allowWatchBookmarks="true", resourceVersion=version, timeoutSeconds=seconds) as response:
            self._report()  # a reported failure has ended
            try:
                async for line in _lines(response.aiter_bytes()):
                    self._apply_event(json.loads(line))
            except httpx2.HTTPError as error:
                _log.debug("%s: the watch broke: %s", self._source, error)
                return False
        return asyncio.get_running_loop().time() - began >= 1.0

    def _apply_event(self, event: Mapping[str, Any]) -> None:
        """Apply an event of the watch. Raises VersionExpiredError and DiscoveryError for an event that ends it."""
        kind, resource = event["type"], event["object"]
        if kind == "ERROR" and resource.get("code") == 410:
            raise VersionExpiredError
        if kind == "ERROR":
            raise DiscoveryError(f"the API server ended the watch: {str(resource.get('message'))[:_MESSAGE]}")
        if kind in ("ADDED", "MODIFIED"):
            self._slices[name_of(resource)] = resource
        elif kind == "DELETED":
            self._slices.pop(name_of(resource), None)
        self.version = str(resource["metadata"]["resourceVersion"])
        self.progressed = True
        if kind != "BOOKMARK":
            self._report()

    def _report(self) -> None:
        self._on_endpoints(observed(self._slices.values(), self._source.port))

    @asynccontextmanager
    async def _get(self, client: httpx2.AsyncClient, **query: str) -> AsyncIterator[httpx2.Response]:
        """Request the slices. Raises VersionExpiredError and DiscoveryError."""
        namespace = self._source.namespace or self._cluster.read("namespace")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        params = {"labelSelector": f"kubernetes.io/service-name={self._source.name}", **query}
        headers = {"authorization": f"Bearer {self._cluster.read('token')}", "accept": "application/json"}
        async with client.stream("GET", path, params=params, headers=headers) as response:
            await _check_status(response)
            yield response


async def _check_status(response: httpx2.Response) -> None:
    """Raise VersionExpiredError or DiscoveryError, with the message of the API server (``Status.message``), for an error."""
    if response.status_code == 410:
        raise VersionExpiredError
    if response.status_code == 200:
        return
    try:
        message = str(json.loads(await response.aread())["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    advice = _ADVICE.get(response.status_code, "")
    raise DiscoveryError(f"the API server says {response.status_code}: {message[:_MESSAGE]}{advice}")


_ADVICE = {
    401: " (is the service account's token good?)",
    403: " (the service account needs a Role with get, list and watch on endpointslices of discovery.k8s.io)",
}


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a watch, each a JSON document. Raises DiscoveryError for a line above the limit."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" not in piece:
            if len(rest) > LINE_LIMIT:
                raise DiscoveryError("the API server sends an event above the size limit")
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.strip():
                yield line
