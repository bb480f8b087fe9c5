"""The key sets of identity providers, fetched by control: looked at again and again, kept while their issuer is away.

The rules: nothing of a request waits for this; the last good set stays until another good one comes; what strangers send can make
it look sooner, but not more often than every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from gateway import config as conf
from gateway.telemetry.dependencies import Observation

_ANSWER = 10.0  # seconds for the whole of an answer
_LEAST = 5.0  # seconds between two looks, whoever asks
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds after the first failure, and at most
_MOST = 1 << 20  # bytes of a key set
_log = logging.getLogger("vllm_gateway.control")


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of an issuer's key set. ``keys``: the last good one; ``problem``: why the last look brought none; ``fetched``: when
    the last good one came, in seconds since the epoch; ``concluded``: whether there was any look."""

    keys: bytes | None = None
    problem: str = ""
    fetched: float | None = None
    concluded: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an issuer's keys are. ``ca``: a file with the authorities that are believed there, None for the usual ones."""

    issuer: str
    url: str
    ca: str | None

    @classmethod
    def of(cls, issuer: conf.Jwt) -> Place | None:
        """None for a file: it is read with the configuration."""
        url = issuer.jwks.url
        return None if url is None else cls(issuer.issuer, url, None if issuer.ca is None else str(issuer.ca))


class TroubleError(Exception):
    """There is no key set to be had; the text says why."""


class KeySets:
    """Follows the key sets that are behind a URL. ``on_change`` is called when one is another."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._followed: dict[Place, _Followed] = {}

    def want(self, config: conf.Config) -> None:
        """Follow the issuers of this configuration, and no others. One whose keys are where they were is not asked anew."""
        wanted = {place: issuer for issuer in config.jwt if (place := Place.of(issuer)) is not None}
        for place in self._followed.keys() - wanted.keys():
            self._followed.pop(place).end()
        for place, issuer in wanted.items():
            if place not in self._followed:
                self._followed[place] = _Followed(place, self._on_change)
            self._followed[place].every = issuer.refresh

    def ask(self, issuer: str) -> None:
        """A worker has met a token of this issuer that is signed by a key that it does not know."""
        for place, followed in self._followed.items():
            if place.issuer == issuer:
                followed.asked.set()

    def known(self) -> dict[str, bytes]:
        """The last good set of each issuer that has one."""
        return {place.issuer: each.found.keys for place, each in self._followed.items() if each.found.keys is not None}

    def awaited(self) -> Set[str]:
        """The issuers of which no answer has come yet, good or bad."""
        return {place.issuer for place, each in self._followed.items() if not each.found.concluded}

    def well(self) -> Iterable[tuple[str, bool]]:
        """For each issuer whether the last look at its keys brought some."""
        return [(place.issuer, each.found.concluded and not each.found.problem) for place, each in self._followed.items()]

    def dependencies(self) -> Iterator[Observation]:
        """Each issuer that was asked at least once."""
        found = ((place.issuer, each.found) for place, each in self._followed.items())
        return (Observation("identity_provider", issuer, one.problem or None) for issuer, one in found if one.concluded)

    def shown(self, config: conf.Config) -> list[dict[str, Any]]:
        """Each issuer as /status shows it."""
        found = {place.issuer: each.found for place, each in self._followed.items()}
        return [_shown(issuer, found.get(issuer.issuer)) for issuer in config.jwt]

    async def close(self) -> None:
        for followed in self._followed.values():
            followed.end()
        await asyncio.gather(*(followed.task for followed in self._followed.values()), return_exceptions=True)


@asynccontextmanager
async def key_sets(on_change: Callable[[], None]) -> AsyncIterator[KeySets]:
    """Followed for the length of the block."""
    followed = KeySets(on_change)
    try:
        yield followed
    finally:
        await followed.close()


def _shown(issuer: conf.Jwt, found: Found | None) -> dict[str, Any]:
    if found is None:
        return {"issuer": issuer.issuer, "keys": "file", "problem": "", "fetched": None}
    return {"issuer": issuer.issuer, "keys": issuer.jwks.url, "problem": found.problem, "fetched": found.fetched}


class _Followed:
    """One issuer's key set, looked at by a task of its own."""

    def __init__(self, place: Place, on_change: Callable[[], None]) -> None:
        self.every = 0.0
        self.found = Found()
        self.asked = asyncio.Event()
        self._place = place
        self._on_change = on_change
        self._known: dict[str, str] = {}  # the headers by which an unchanged set is known (RFC 9110, section 13.1)
        self.task = asyncio.create_task(self._follow())

    def end(self) -> None:
        self.task.cancel()

    async def _follow(self) -> None:
        pause = _PAUSE
        while True:
            await self._look()
            pause = min(2 * pause, _LONGEST_PAUSE) if self.found.problem else _PAUSE
            await self._until_due(pause if self.found.problem else self.every)

    async def _until_due(self, seconds: float) -> None:
        began = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.asked.wait()
        if self.asked.is_set():
            await asyncio.sleep(began + min(_LEAST, seconds) - time.monotonic())
        self.asked.clear()

    async def _look(self) -> None:
        before = self.found
        try:
            async with asyncio.timeout(_ANSWER):
                keys = await self._fetched()
        except (TroubleError, TimeoutError, OSError) as error:
            self.found = replace(before, problem=str(error) or "it does not answer in time", concluded=True)
        else:
            self.found = Found(keys or before.keys, "", time.time(), concluded=True)
        self._tell(before)

    def _tell(self, before: Found) -> None:
        if self.found.problem and self.found.problem != before.problem:
            stays = "; the keys that are known stay" if self.found.keys else ""
            _log.warning("the keys of %s cannot be read from %s: %s%s", self._place.issuer, self._place.url, self.found.problem, stays)
        elif before.problem and not self.found.problem:
            _log.warning("the keys of %s can be read again", self._place.issuer)
        if self.found.keys != before.keys or not before.concluded:
            self._on_change()

    async def _fetched(self) -> bytes | None:
        """The set as ``verification_keys`` gives it; None where it is what it was. Raises TroubleError, OSError."""
        from gateway.auth.jwks import KeySetError, verification_keys  # with PyJWT, which is an extra

        trust = True if self._place.ca is None else ssl.create_default_context(cafile=self._place.ca)
        headers = {"accept": "application/json"} | self._known
        try:
            async with (
                httpx2.AsyncClient(verify=trust, timeout=_ANSWER) as client,  # with the environment's proxy: it may be far away
                client.stream("GET", self._place.url, headers=headers) as answer,
            ):
                if answer.status_code == 304 and self._known:
                    return None
                if answer.status_code != 200:
                    raise TroubleError(f"it answered with status {answer.status_code}")
                document = await _bounded(answer)
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, ImportError) as error:  # the last two: a proxy of an unknown kind
            raise TroubleError(str(error) or type(error).__name__) from error
        try:
            keys = verification_keys(document)
        except KeySetError as error:
            raise TroubleError(f"what it answered {error}") from None
        self._known = _validators(answer.headers)
        return keys


async def _bounded(answer: httpx2.Response) -> bytes:
    document = b""
    async for part in answer.aiter_bytes():
        document += part
        if len(document) > _MOST:
            raise TroubleError(f"what it answered is larger than {_MOST} bytes")
    return document


def _validators(headers: Mapping[str, str]) -> dict[str, str]:
    given = {"if-none-match": headers.get("etag"), "if-modified-since": headers.get("last-modified")}
    return {name: value for name, value in given.items() if value is not None}
