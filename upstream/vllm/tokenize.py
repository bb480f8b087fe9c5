"""Request the token IDs of a prompt from a server, within bounds of time, number and memory.

The rules: a failure is never an error of the request, which then does without token IDs. After several failures in a row, nothing is
requested for a while. At most ``WAITING`` requests wait at the same time. The IDs of the last prompts are stored, because clients repeat
requests.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from time import monotonic

import msgspec

from upstream.balancing.server import Server
from upstream.balancing.side_requests import SideRequests
from upstream.http.errors import UpstreamError

PATH = "/tokenize"
TIMEOUT = 0.5
"""Seconds for a response; a deadline is up to a tick late. It takes milliseconds unless the server's main process is overloaded."""
WAITING = 64
PAUSE = 5.0
"""Seconds without a request after ``_FAILURES`` failures in a row."""
STORED_TOKENS = 2_000_000
"""Token IDs of earlier prompts, of 4 bytes each."""
_ENTRY = 64  # token IDs that take as much memory as an entry without any
_FAILURES = 5


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Tokenization:
    """Requests token IDs from the servers of a worker's models, with ``side_requests``."""

    def __init__(self, side_requests: SideRequests, timeout: float = TIMEOUT, stored_tokens: int = STORED_TOKENS) -> None:
        self._side_requests = side_requests
        self._timeout = timeout
        self._stored_tokens = stored_tokens
        self._stored: OrderedDict[bytes, array[int]] = OrderedDict()
        self._size = 0
        self._waiting = 0
        self._failures = 0
        self._paused_until = 0.0
        self._decoder = msgspec.json.Decoder(_Tokens)

    async def token_ids(self, server: Server, body: bytes) -> Sequence[int] | None:
        """Return the token IDs for the body of a request to ``/tokenize``; None if they are not known in time."""
        digest = blake2b(body, digest_size=16).digest()
        if (found := self._stored.get(digest)) is not None:
            self._stored.move_to_end(digest)
            return found
        if self._waiting >= WAITING or monotonic() < self._paused_until or not self._side_requests.may_serve(server, PATH):
            return None
        self._waiting += 1
        try:
            ids = await self._request(server, body)
        finally:
            self._waiting -= 1
        if ids is None:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._paused_until = monotonic() + PAUSE
            return None
        self._failures = 0
        if digest not in self._stored:  # an equal request may have been faster
            self._stored[digest] = ids
            self._size += len(ids) + _ENTRY
            while self._size > self._stored_tokens:
                _, oldest = self._stored.popitem(last=False)
                self._size -= len(oldest) + _ENTRY
        return ids

    async def _request(self, server: Server, body: bytes) -> array[int] | None:
        try:
            status, content = await self._side_requests.post(server, PATH, body, self._timeout)
            return array("I", self._decoder.decode(content).tokens) if status == 200 else None
        except (UpstreamError, msgspec.DecodeError, OverflowError):
            return None
