"""Fetch the JWKS of identity providers: refresh them at an interval, and retain them while their issuer is unreachable.

The rules: no request waits for a fetch. The last valid JWKS is used until the next valid one. Tokens of unauthenticated clients can
trigger an earlier fetch, but only every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway import config as conf
from gateway.auth.provider_request import ProviderError, request
from gateway.system.tasks import cancel, wait_at_most
from gateway.telemetry.dependencies import Observation
from upstream.backoff import Backoff

_MIN_INTERVAL = 5.0  # seconds between two fetches
_PAUSES = 1.0, 60.0  # seconds after the first failure, and at most
_log = logging.getLogger("vllm_gateway.control")


@dataclass(frozen=True, slots=True)
class JwksStatus:
    """The state of an issuer's JWKS.

    ``keys`` is the last valid JWKS. ``problem`` is the reason why the last fetch failed. ``fetched`` is the time of the last successful
    fetch, in seconds since the epoch. ``concluded``: at least one fetch has finished.
    """

    keys: bytes | None = None
    problem: str = ""
    fetched: float | None = None
    concluded: bool = False


@dataclass(frozen=True, slots=True)
class JwksSource:
    """The URL of an issuer's JWKS. ``ca`` is a file with the trusted certificate authorities; None: use the system's authorities."""

    issuer: str
    url: str
    ca: Path | None


class JwksFetcher:
    """Fetches every JWKS that is configured as a URL. ``on_change`` is called when a JWKS has changed, and after each first fetch."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._polls: dict[JwksSource, _JwksPoll] = {}

    def follow(self, config: conf.Config) -> None:
        """Fetch the JWKS of this configuration's issuers, and no others. An unchanged source is not fetched again."""
        # A file is read with the configuration.
        wanted = {JwksSource(each.issuer, each.jwks.url, each.ca): each for each in config.jwt if each.jwks.url is not None}
        for source in self._polls.keys() - wanted.keys():
            self._polls.pop(source).task.cancel()
        for source, issuer in wanted.items():
            if source not in self._polls:
                self._polls[source] = _JwksPoll(source, self._on_change)
            self._polls[source].interval = issuer.refresh

    def request(self, issuer: str) -> None:
        """Fetch an issuer's JWKS soon, because a token is signed with an unknown key."""
        for source, poll in self._polls.items():
            if source.issuer == issuer:
                poll.requested.set()

    def known(self) -> dict[str, bytes]:
        """Return the last valid JWKS of each issuer that has one."""
        return {source.issuer: poll.status.keys for source, poll in self._polls.items() if poll.status.keys is not None}

    def unfetched(self) -> Set[str]:
        """Return the issuers whose first fetch has not finished."""
        return {source.issuer for source, poll in self._polls.items() if not poll.status.concluded}

    def well(self) -> Iterable[tuple[str, bool]]:
        """Return, for each issuer, whether the last fetch was successful."""
        return [(source.issuer, poll.status.concluded and not poll.status.problem) for source, poll in self._polls.items()]

    def dependencies(self) -> Iterator[Observation]:
        """Yield each issuer that was fetched at least once."""
        statuses = ((source.issuer, poll.status) for source, poll in self._polls.items())
        return (Observation("identity_provider", issuer, status.problem or None) for issuer, status in statuses if status.concluded)

    def as_json(self, config: conf.Config) -> list[dict[str, Any]]:
        """Return each issuer as /status shows it."""
        statuses = {source.issuer: poll.status for source, poll in self._polls.items()}
        return [_as_json(issuer, statuses.get(issuer.issuer, JwksStatus())) for issuer in config.jwt]

    async def aclose(self) -> None:
        """Stop all fetches."""
        await cancel(*(poll.task for poll in self._polls.values()))


def _as_json(issuer: conf.Jwt, status: JwksStatus) -> dict[str, Any]:
    return {"issuer": issuer.issuer, "keys": issuer.jwks.url or "file", "problem": status.problem, "fetched": status.fetched}


class _JwksPoll:
    """Polls one issuer's JWKS in a task. ``interval`` is in seconds."""

    def __init__(self, source: JwksSource, on_change: Callable[[], None]) -> None:
        self.interval = 0.0
        self.status = JwksStatus()
        self.requested = asyncio.Event()
        self._source = source
        self._on_change = on_change
        self._validators: dict[str, str] = {}  # headers of a conditional request (RFC 9110, section 13.1)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        backoff = Backoff(*_PAUSES)
        while True:
            await self._poll()
            if self.status.problem:
                await self._wait(backoff.next_pause())
            else:
                backoff.reset()
                await self._wait(self.interval)

    async def _wait(self, seconds: float) -> None:
        """Wait until the next fetch: for ``seconds``, or until a fetch is requested and the minimum interval has passed."""
        started = time.monotonic()
        await wait_at_most(seconds, self.requested.wait())
        if self.requested.is_set():
            await asyncio.sleep(started + min(_MIN_INTERVAL, seconds) - time.monotonic())
        self.requested.clear()

    async def _poll(self) -> None:
        before, source = self.status, self._source
        try:
            keys = await self._fetch()
        except OSError as error:
            status = replace(before, problem=str(error) or "it does not respond in time", concluded=True)
        else:
            status = JwksStatus(keys or before.keys, "", time.time(), concluded=True)
        self.status = status
        if status.problem and status.problem != before.problem:
            retained = "; the last known keys stay in use" if status.keys else ""
            _log.warning("the keys of %s cannot be fetched from %s: %s%s", source.issuer, source.url, status.problem, retained)
        elif before.problem and not status.problem:
            _log.warning("the keys of %s can be fetched again", source.issuer)
        if status.keys != before.keys or not before.concluded:
            self._on_change()

    async def _fetch(self) -> bytes | None:
        """Fetch the JWKS, as ``verification_keys`` returns it. None: it has not changed. Raises OSError."""
        from gateway.auth.jwks import KeySetError, verification_keys  # with PyJWT, which is an extra

        headers = {"accept": "application/json"} | self._validators
        response, document = await request("GET", self._source.url, headers, ca=self._source.ca)
        if response.status_code == 304 and self._validators:
            return None
        if response.status_code != 200:
            raise ProviderError(f"it responded with status {response.status_code}")
        try:
            keys = verification_keys(document)
        except KeySetError as error:
            raise ProviderError(f"its response {error}") from None
        given = {"if-none-match": response.headers.get("etag"), "if-modified-since": response.headers.get("last-modified")}
        self._validators = {name: value for name, value in given.items() if value is not None}
        return keys
