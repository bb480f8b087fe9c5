"""Kubernetes: the EndpointSlices of a service, by list and watch, from inside a pod.

One list of what there is, then a watch of what changes, resumed where it ended (Kubernetes API concepts, "Efficient detection of
changes"). The rules: a version that the server no longer knows (410) means a new list; whatever was found stays until then; the
token is read for each request, since it is replaced while the pod runs.

Two GETs on one resource do not need a client library. Those that there are bring a second HTTP client (lightkube and kr8s: httpx,
kubernetes_asyncio: aiohttp and 10 MB of generated classes); this is done with the one that is here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from upstream.discovery.endpoints import EndpointSlices, Observation

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has ``token``, ``ca.crt`` and ``namespace`` (Kubernetes documentation, "Accessing the API from within a Pod")."""
WATCH = 60.0
"""Seconds after which a watch is to end and be resumed: so long a broken connection may go unnoticed."""
LINE_LIMIT = 8 << 20
"""Bytes of one event. A slice has 1,000 endpoints at most, and etcd takes 1.5 MiB."""
_ANSWER = 10.0  # seconds for a connection, and for an answer to begin
_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds after the first failure, and at most
_WORDS = 300  # characters of what the API server says
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A service by name. ``namespace``: None for the pod's own; ``port``: number or name of its endpoints' port, None for the only one."""

    name: str
    namespace: str | None = None
    port: int | str | None = None

    def __str__(self) -> str:
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"kubernetes {place}" + (f":{self.port}" if self.port is not None else "")


class DiscoveryError(Exception):
    """The API server could not be asked, or did not answer as it should; the text says why."""


class VersionExpiredError(Exception):
    """The version that the watch was to go on from is no longer known (410)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How a pod reaches its API server. ``host`` is empty outside a cluster; ``folder`` has the service account's files."""

    host: str
    port: str
    folder: Path = SERVICE_ACCOUNT

    @classmethod
    def of(cls, environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Cluster:
        """As the environment of a pod says."""
        return cls(environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443"), folder)

    @property
    def base_url(self) -> str:
        return f"https://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def client(self) -> httpx2.AsyncClient:
        """A client that trusts the cluster's authority alone. Raises TroubleError."""
        if not self.host:
            raise DiscoveryError("this is no pod of a cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            trust = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise DiscoveryError(f"{self.folder / 'ca.crt'}: {error}") from error
        timeout = httpx2.Timeout(_ANSWER, read=WATCH + _ANSWER)
        return httpx2.AsyncClient(base_url=self.base_url, verify=trust, timeout=timeout, trust_env=False)

    def read(self, name: str) -> str:
        """One of the service account's files. Raises TroubleError."""
        try:
            return (self.folder / name).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise DiscoveryError(f"{self.folder / name}: {getattr(error, 'strerror', None) or error}") from error


async def watch(source: Service, cluster: Cluster, on_seen: Callable[[Observation], None], on_trouble: Callable[[str], None]) -> None:
    """Tell what is found, and what goes wrong, until cancelled."""
    follower, failures = _Follower(source, cluster, on_seen), 0
    while True:
        try:
            await follower.follow()
        except DiscoveryError as error:
            on_trouble(str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            on_trouble(f"the API server's answer is not what it should be ({type(error).__name__}: {error})")
            follower.version = None
        failures = 1 if follower.progressed else failures + 1
        follower.progressed = False
        pause = min(_PAUSE * 2 ** min(failures - 1, 10), _LONGEST_PAUSE)
        await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load, no secret


class _Follower:
    """What is known of one service. ``version`` is where the watch goes on, None before a list; ``progressed``: something was learned."""

    def __init__(self, source: Service, cluster: Cluster, on_seen: Callable[[Observation], None]) -> None:
        self._source = source
        self._cluster = cluster
        self._on_seen = on_seen
        self._slices = EndpointSlices()
        self.version: str | None = None
        self.progressed = False

    async def follow(self) -> None:
        """List if need be, then watch for as long as that goes well. Raises TroubleError."""
        try:
            async with self._cluster.client() as client:
                if self.version is None:
                    await self._list(client)
                while await self._watch(client):
                    self.progressed = True
        except VersionExpiredError:
            _log.debug("%s: listed anew", self._source)
            self.version = None
        except (httpx2.HTTPError, TimeoutError) as error:
            raise DiscoveryError(f"the API server at {self._cluster.base_url}: {str(error) or type(error).__name__}") from error

    async def _list(self, client: httpx2.AsyncClient) -> None:
        async with asyncio.timeout(2 * _ANSWER), client.stream("GET", self._path, params=self._query, headers=self._headers()) as answer:
            await _see_to_status(answer)
            document = json.loads(await answer.aread())
        self._slices.replace(document["items"])
        self.version = str(document["metadata"]["resourceVersion"])
        self._report()

    async def _watch(self, client: httpx2.AsyncClient) -> bool:
        """One watch to its end; whether that was in good order and not at once. One that breaks is resumed. Raises GoneError."""
        began = asyncio.get_running_loop().time()
        seconds = int(WATCH * random.uniform(0.8, 1.0))  # noqa: S311 - spreads load, no secret
        words = self._query | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self.version),
            "timeoutSeconds": str(seconds),
        }
        async with client.stream("GET", self._path, params=words, headers=self._headers()) as answer:
            await _see_to_status(answer)
            self._report()  # what was wrong is no longer
            try:
                async for line in _lines(answer.aiter_bytes()):
                    self._apply_event(json.loads(line))
            except httpx2.HTTPError as error:
                _log.debug("%s: the watch broke: %s", self._source, error)
                return False
        return asyncio.get_running_loop().time() - began >= 1.0

    def _apply_event(self, event: Mapping[str, Any]) -> None:
        kind, thing = event["type"], event["object"]
        if kind == "ERROR":
            _see_to_error(thing)
        if kind in ("ADDED", "MODIFIED"):
            self._slices.put(thing)
        elif kind == "DELETED":
            self._slices.remove(thing)
        self.version = str(thing["metadata"]["resourceVersion"])
        self.progressed = True
        if kind != "BOOKMARK":
            self._report()

    def _report(self) -> None:
        self._on_seen(self._slices.observation(self._source.port))

    @property
    def _path(self) -> str:
        namespace = self._source.namespace or self._cluster.read("namespace")
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    @property
    def _query(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._source.name}"}

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._cluster.read('token')}", "accept": "application/json"}


async def _see_to_status(answer: httpx2.Response) -> None:
    """Raises GoneError and TroubleError, with the API server's own words where it has some (``Status.message``)."""
    if answer.status_code == 410:
        raise VersionExpiredError
    if answer.status_code == 200:
        return
    try:
        message = str(json.loads(await answer.aread())["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.reason_phrase
    advice = _ADVICE.get(answer.status_code, "")
    raise DiscoveryError(f"the API server says {answer.status_code}: {message[:_WORDS]}{advice}")


_ADVICE = {
    401: " (is the service account's token good?)",
    403: " (the service account needs a Role with get, list and watch on endpointslices of discovery.k8s.io)",
}


def _see_to_error(status: Mapping[str, Any]) -> None:
    """An event that ends the watch. Raises GoneError and TroubleError."""
    if status.get("code") == 410:
        raise VersionExpiredError
    raise DiscoveryError(f"the API server ended the watch: {str(status.get('message'))[:_WORDS]}")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a watch, each a JSON document. Raises TroubleError for one that does not end."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" not in piece:
            if len(rest) > LINE_LIMIT:
                raise DiscoveryError("the API server sends an event without end")
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.strip():
                yield line
