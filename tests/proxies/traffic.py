"""Requests of clients, drawn from a seed. Pure.

``ordinary`` draws valid requests as clients send them. ``hostile`` draws one of ``KINDS``: what a client can do with bytes to make two
parsers read them in two ways, or to leave them in a state in which the next request is read as a part of the last. Each plan lists the
secrets that a response on its connection may contain.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import orjson

from tests.proxies.origin import MISBEHAVIOR
from tests.proxies.secrets import KEYS, NO_KEY, new

PATH = b"/v1/chat/completions"
LINE = b"POST %b HTTP/1.1\r\n" % PATH
HOST = b"gateway.test"
_SDK = (
    b"Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: OpenAI/Python 3.0.0\r\nX-Stainless-Lang: python\r\n"
    b"X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nX-Stainless-Retry-Count: 0\r\n"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The bytes of one connection: ``pieces``, one write each, and whether it then disconnects at once."""

    pieces: Sequence[bytes]
    own: frozenset[bytes] = frozenset()
    """The secrets that responses may contain."""
    disconnects: bool = False
    beside: Sequence[bytes] = field(default=())
    """Complete requests that are sent immediately afterwards, each on another connection."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client with a key. ``credentials``: the values of the Authorization headers of all keys."""

    dice: random.Random
    number: int
    credentials: Sequence[bytes]

    @property
    def key(self) -> bytes:
        return b"Authorization: %b\r\n" % self.credentials[self.number]

    @property
    def other_key(self) -> bytes:
        """The Authorization header of another client."""
        return b"Authorization: %b\r\n" % self.credentials[(self.number + self.dice.randrange(1, KEYS)) % KEYS]

    def secret(self) -> bytes:
        return new(self.dice, f"{self.number:04}")

    def no_secret(self) -> bytes:
        """Return a secret that must not reach a server."""
        return new(self.dice, NO_KEY)


def document(secret: bytes, *, stream: bool = False, padding: int = 0, model: str = "m", user: str | None = None) -> bytes:
    """Return the body of a chat request."""
    fields = {"model": model, "messages": [{"role": "user", "content": secret.decode() + " x" * padding}], "stream": stream}
    return orjson.dumps(fields | ({"user": user} if user else {}))


def request(headers: bytes, body: bytes, line: bytes = LINE) -> bytes:
    """Return a request with a Content-Length as its last header."""
    return b"%bHost: %b\r\n%bContent-Length: %d\r\n\r\n%b" % (line, HOST, headers, len(body), body)


def ordinary(client: Client) -> tuple[bytes, bytes]:
    """Draw a valid request. Returns its bytes and its secret."""
    dice, secret = client.dice, client.secret()
    padding = dice.choices((0, 2_000, 40_000), (90, 9, 1))[0]
    body = document(secret, stream=dice.random() < 0.2, padding=padding)
    more = dice.choice((b"", _SDK, b"Accept: */*\r\n"))
    headers = more + client.key if dice.random() < 0.5 else client.key + more
    return request(headers + b"Content-Type: application/json\r\n", body), secret


def hostile(client: Client, kinds: Sequence[str]) -> tuple[str, Plan]:
    """Draw a kind, and a plan of this kind."""
    kind = client.dice.choice(kinds)
    return kind, KINDS[kind](client)


# Kinds


def _one(client: Client) -> tuple[bytes, bytes]:
    secret = client.secret()
    return request(client.key, document(secret, stream=client.dice.random() < 0.3)), secret


def _follow(client: Client) -> tuple[bytes, bytes]:
    """Return a request to be hidden behind another: with the client's key."""
    return _one(client)


def _pipelined(client: Client) -> Plan:
    pairs = [_one(client) for _ in range(client.dice.randrange(2, 7))]
    return Plan([b"".join(wire for wire, _ in pairs)], frozenset(secret for _, secret in pairs))


def _cut(client: Client) -> Plan:
    wire, secret = _one(client)
    return Plan([wire[: client.dice.randrange(1, len(wire))]], frozenset((secret,)), disconnects=client.dice.random() < 0.7)


def _disconnected(client: Client) -> Plan:
    wire, secret = _one(client)
    return Plan([wire], frozenset((secret,)), disconnects=True)


def _single_bytes(client: Client) -> Plan:
    wire, secret = _one(client)
    return Plan([wire[at : at + 1] for at in range(len(wire))], frozenset((secret,)))


def _short_body(client: Client) -> Plan:
    secret, inner = client.secret(), request(client.other_key, document(client.no_secret()))
    body = document(secret) + inner
    wire = request(client.key, body)
    return Plan([wire[: len(wire) - client.dice.randrange(1, len(inner))]], frozenset((secret,)), disconnects=client.dice.random() < 0.5)


def _long_body(client: Client) -> Plan:
    wire, secret = _one(client)
    inner, second = _follow(client)
    return Plan([wire + client.dice.choice((b"", b"\r\n", b"{}", b"\0", b"0\r\n\r\n", b"GET ")) + inner], frozenset((secret, second)))


def _request_in_body(client: Client) -> Plan:
    """The body is a complete request with the key of another client."""
    inner = request(client.other_key, document(client.no_secret()))
    wire, secret = _one(client)
    split = client.dice.random() < 0.5
    outer = request(client.key, inner)
    return Plan([outer[: -len(inner)], inner, wire] if split else [outer + wire], frozenset((secret,)))


def _chunk(client: Client, body: bytes) -> bytes:
    size = b"%x" % len(body)
    return client.dice.choice(
        (
            size + b"\r\n", size.upper() + b"\r\n", b"000" + size + b"\r\n", size + b";a=b\r\n", size + b';a="\r\nx"\r\n', size + b" \r\n",
            size + b"\t;x\r\n", size + b";" + b"e" * 3000 + b"\r\n", b"0x" + size + b"\r\n", b"+" + size + b"\r\n", size + b"\n",
            size + b"\r", b" " + size + b"\r\n", b"-" + size + b"\r\n", b"fffffffffffffffff\r\n", b"\r\n", size + b"_\r\n",
            size + b";\n\r\n", b"%x\r\n" % (len(body) + 2), b"%x\r\n" % (len(body) - 1),
        )
    )  # fmt: skip


def _chunked(client: Client) -> Plan:
    dice, secret = client.dice, client.secret()
    body = document(secret)
    at = dice.randrange(body.find(b"}"), len(body))  # not in the secret, which would be another one
    coded = b"".join(_chunk(client, part) + part + dice.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"")) for part in (body[:at], body[at:]))
    end = dice.choice(
        (b"0\r\n\r\n", b"0\r\nX-A: b\r\n\r\n", b"0\r\n" + client.other_key + b"Content-Length: 5\r\n\r\n", b"00\r\n\r\n", b"0\n\n")
    )
    inner, second = _follow(client)
    headers = b"%bHost: %b\r\n%bTransfer-Encoding: chunked\r\n\r\n" % (LINE, HOST, client.key)
    return Plan([headers, coded + end + inner] if dice.random() < 0.5 else [headers + coded + end + inner], frozenset((secret, second)))


_ENCODINGS = (
    b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding:\tchunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding: chunked\t", b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding:\r\n chunked",
    b"X: x\nTransfer-Encoding: chunked", b"Transfer-Encoding: 'chunked'", b"Transfer-Encoding: chunKed", b"Transfer_Encoding: chunked",
    b" Transfer-Encoding: chunked", b"Transfer-Encoding: chunked;q=1", b"Transfer-Encoding: \xffchunked", b"Transfer-\0Encoding: chunked",
)  # fmt: skip


def _two_framings(client: Client) -> Plan:
    """A transfer encoding and a length, which differ and hide a request in the body."""
    dice = client.dice
    inner, second = _follow(client)
    encoding = dice.choice(_ENCODINGS) + b"\r\n"
    if dice.random() < 0.5:  # by chunks the body is empty, by the length it contains the request
        body = b"0\r\n\r\n" + inner
        length = b"Content-Length: %d\r\n" % len(body)
    else:  # by the length the body ends in the first chunk
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
        length = b"Content-Length: %d\r\n" % (body.find(b"\r\n") + 2)
    framing = encoding + length if dice.random() < 0.5 else length + encoding
    return Plan([b"%bHost: %b\r\n%b%b\r\n%b" % (LINE, HOST, client.key, framing, body)], frozenset((second,)))


def _two_lengths(client: Client) -> Plan:
    wire, secret = _one(client)
    inner, second = _follow(client)
    start, _, body = wire.partition(b"\r\n\r\n")
    size = len(body)
    start = start[: start.rfind(b"\r\n") + 2]
    length = client.dice.choice(
        (
            b"Content-Length: %d\r\nContent-Length: %d" % (size, size), b"Content-Length: %d\r\nContent-Length: 0" % size,
            b"Content-Length: 0\r\nContent-Length: %d" % size, b"Content-Length: %d, %d" % (size, size), b"Content-Length: +%d" % size,
            b"Content-Length: %d " % size, b"Content-Length: 0x%x" % size, b"Content-Length: 00%d" % size, b"Content-Length : %d" % size,
            b"Content-Length:\t%d" % size, b"Content-Length: %d_" % size, b"Content-Length: -%d" % size, b"Content_Length: %d" % size,
            b"Content-Length: %d" % (size + 2**64), b"Content-Length:\r\n %d" % size,
            b"Content-Length: %d\r\nConnection: content-length" % size,
        )
    )  # fmt: skip
    return Plan([start + length + b"\r\n\r\n" + body + inner], frozenset((secret, second)))


_LINES = (
    b"X-A: b\r\n c: d\r\n", b"X-A: b\r\n\tc\r\n", b"X-A: b\nX-C: d\r\n", b"X-A: b\rX-C: d\r\n", b"X-A: b\0c\r\n", b"X A: b\r\n", b": b\r\n",
    b"X-A\r\n", b"X-A: \xff\xfe\r\n", b"\r X: y\r\n", b" X: y\r\n", b"X-A: " + b"a" * 9000 + b"\r\n", b"X-A: b\r\n" * 99,
    b"X-A: b\r\n" * 130,
    b"Connection: keep-alive, authorization\r\n", b"Connection: close, host\r\n", b"Host: other.test\r\n", b"Expect: 100-continue\r\n",
    b"Expect: x\r\n", b"TE: trailers\r\n", b"Proxy-Connection: keep-alive\r\n", b"Keep-Alive: timeout=0\r\n",
    b"X-Forwarded-For: 1.2.3.4\r\n",
)  # fmt: skip


def _odd_headers(client: Client) -> Plan:
    secret = client.secret()
    lines = client.dice.choice(_LINES)
    headers = lines + client.key if client.dice.random() < 0.5 else client.key + lines
    wire, second = _one(client)
    return Plan([request(headers, document(secret)) + wire], frozenset((secret, second)))


_REQUEST_LINES = (
    b"POST http://gateway.test%b HTTP/1.1\r\n" % PATH, b"POST //gateway.test%b HTTP/1.1\r\n" % PATH, b"POST %b?a=b#c HTTP/1.1\r\n" % PATH,
    b"POST /v1/../v1/chat/completions HTTP/1.1\r\n", b"POST /v1/chat%2fcompletions HTTP/1.1\r\n", b"POST * HTTP/1.1\r\n",
    b"POST gateway.test:80 HTTP/1.1\r\n", b"POST  %b HTTP/1.1\r\n" % PATH, b"POST\t%b\tHTTP/1.1\r\n" % PATH,
    b"POST %b  HTTP/1.1\r\n" % PATH,
    b"POST %b HTTP/1.0\r\n" % PATH, b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\n" % PATH, b"POST %b HTTP/0.9\r\n" % PATH,
    b"POST %b HTTP/2.0\r\n" % PATH, b"POST %b HTTP/1.2\r\n" % PATH, b"POST %b\r\n" % PATH, b"POST %b HTTP/1.1 \r\n" % PATH,
    b"post %b HTTP/1.1\r\n" % PATH, b"\r\n\r\nPOST %b HTTP/1.1\r\n" % PATH, b"POST %b HTTP/1.1\n" % PATH, b"GET %b HTTP/1.1\r\n" % PATH,
    b"HEAD %b HTTP/1.1\r\n" % PATH, b"OPTIONS %b HTTP/1.1\r\n" % PATH, b"TRACE %b HTTP/1.1\r\n" % PATH,
    b"CONNECT gateway.test:80 HTTP/1.1\r\n",
    b"HEAD /v1/models HTTP/1.1\r\n", b"GET /v1/models HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"SOURCE %b ICE/1.1\r\n" % PATH,
    b"POST /v1/unknown HTTP/1.1\r\n", b"PUT %b HTTP/1.1\r\n" % PATH, b"M-SEARCH %b HTTP/1.1\r\n" % PATH, b"POST %b\0 HTTP/1.1\r\n" % PATH,
)  # fmt: skip


def _odd_line(client: Client) -> Plan:
    secret = client.secret()
    wire, second = _one(client)
    return Plan([request(client.key, document(secret), client.dice.choice(_REQUEST_LINES)) + wire], frozenset((secret, second)))


def _upgrade(client: Client) -> Plan:
    secret, dice = client.secret(), client.dice
    offer = dice.choice((b"h2c", b"websocket", b"TLS/1.0", b"h2c, websocket"))
    names = dice.choice((b"Upgrade", b"Upgrade, HTTP2-Settings", b"keep-alive, Upgrade"))
    headers = client.key + b"Connection: %b\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n" % (names, offer)
    wire, second = _one(client)
    after = dice.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", wire))
    return Plan([request(headers, document(secret)) + after], frozenset((secret, second)))


def _expect(client: Client) -> Plan:
    secret = client.secret()
    wire = request(client.key + b"Expect: 100-continue\r\n", document(secret))
    at = wire.find(b"\r\n\r\n") + 4
    inner, second = _follow(client)
    return Plan([wire[:at], client.dice.choice((wire[at:], inner, b""))], frozenset((secret, second)))


def _no_key(client: Client) -> Plan:
    """A request without a valid key, or with its key in a header that parsers read in two ways."""
    none, dice = client.no_secret(), client.dice
    if dice.random() < 0.2:
        secret = client.secret()
        key = dice.choice((client.key.replace(b":", b" :", 1), b"X-A: b\r\n " + client.key, client.key.replace(b" ", b"\t", 1)))
        return Plan([request(key, document(secret))], frozenset((secret,)))
    key = dice.choice(
        (
            b"", b"Authorization: Bearer sk-shared-9999\r\n", b"Authorization: Bearer \r\n", b"Authorization:\r\n",
            client.key + client.other_key,
            client.key.replace(b"Bearer", b"Basic"), client.key.replace(b"Authorization", b"X-Authorization"), client.key[:-6] + b"\r\n",
        )
    )  # fmt: skip
    return Plan([request(key, document(none))])


def _line_in_header(client: Client) -> Plan:
    """The value of the last header before the framing is a request line. Then others send exactly the rest, without a key."""
    dice, secret = client.dice, client.secret()
    name = dice.choice((b"X-A", b"X-Trace", b"User-Agent", b"Referer"))
    body = document(secret)
    rest = b"%bHost: %b\r\nContent-Length: " % (LINE, HOST)
    wire = b"%b%b%b: %b%d\r\n\r\n%b" % (LINE, client.key, name, rest, len(body), body)
    bodies = [document(client.no_secret()) for _ in range(8)]
    return Plan([wire], frozenset((secret,)), beside=[b"%b%d\r\n\r\n%b" % (rest, len(each), each) for each in bodies])


def _misbehaving_server(client: Client) -> Plan:
    secret = client.secret()
    body = document(secret, model="faulty", user=client.dice.choice((*MISBEHAVIOR, "")))
    return Plan([request(client.key, body)], frozenset((secret,)), disconnects=client.dice.random() < 0.1)


def _stream_cut(client: Client) -> Plan:
    secret = client.secret()
    wire = request(client.key, document(secret, stream=True, padding=client.dice.choice((0, 30_000))))
    return Plan([wire[:-1], wire[-1:]], frozenset((secret,)), disconnects=True)


def _garbage(client: Client) -> Plan:
    wire, secret = _one(client)
    changed = bytearray(wire)
    for _ in range(client.dice.randrange(1, 5)):
        changed[client.dice.randrange(wire.find(b"\r\n\r\n"))] = client.dice.randrange(256)
    # A changed digit may make another valid key, whose number is then not that of the secret: only the key's own line stays.
    return Plan([bytes(changed) if client.key in bytes(changed) else client.dice.randbytes(200)], frozenset((secret,)))


KINDS: Mapping[str, Callable[[Client], Plan]] = MappingProxyType(
    {
        "pipelined": _pipelined,
        "cut": _cut,
        "disconnected": _disconnected,
        "single bytes": _single_bytes,
        "body shorter than its length": _short_body,
        "body longer than its length": _long_body,
        "request in a body": _request_in_body,
        "chunks": _chunked,
        "length and transfer encoding": _two_framings,
        "lengths": _two_lengths,
        "headers": _odd_headers,
        "request lines": _odd_line,
        "upgrade": _upgrade,
        "expect": _expect,
        "no valid key": _no_key,
        "request line in a header": _line_in_header,
        "misbehaving server": _misbehaving_server,
        "stream cut": _stream_cut,
        "changed bytes": _garbage,
    }
)
WITH_LENGTH = ("cut", "disconnected", "body shorter than its length", "request in a body", "no valid key", "request line in a header")
"""The kinds that ``sharing.sharing`` forwards."""
