"""The rows of the fault matrix: injected faults and expected results."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One fault and its expected result."""

    fault: str
    expected: str


ROWS: dict[int, Row] = {
    1: Row(
        "The server is killed (kill -9) under 1,000 streams",
        "no stream hangs after 5 s; every stream ends with a valid error; no record is lost",
    ),
    2: Row(
        "A stream is cut at each of its bytes",
        "a client never sees a partial event",
    ),
    3: Row(
        "The server dies before its first event",
        "another server, or a 502 without one; never a truncated 200",
    ),
    4: Row(
        "The server freezes and later continues",
        "the idle timeout, within a second, as an error event; later bytes reach no other client",
    ),
    5: Row(
        "Connections are refused, or the server's backlog is full",
        "another server, or a 502 within 2.1 s",
    ),
    6: Row(
        "100,000 POSTs on idle connections that the server closes",
        "no error; no request runs twice",
    ),
    7: Row(
        "10,000 clients disconnect, in every state",
        "the server notices, in 99 of 100 cases within 200 ms; no connection or slot is left",
    ),
    8: Row(
        "1,000 slow readers of a fast stream",
        "memory grows by less than 256 MiB; others are slowed by at most a factor of two",
    ),
    9: Row(
        "A client stops reading",
        "its slot is free within 65 s",
    ),
    10: Row(
        "5,000 clients with slow headers, 5,000 silent clients, slow bodies",
        "closed in time; others are slowed by at most a factor of two",
    ),
    11: Row(
        "Bodies above the limit, sized and chunked; 100 large bodies at once",
        "413; memory stays bounded",
    ),
    12: Row(
        "Headers of 64 KiB; 1,000 headers",
        "431",
    ),
    13: Row(
        "Ambiguous framing; pipelining",
        "400 and a closed connection; no additional request at the server",
    ),
    14: Row(
        "Invalid compressed bodies, other encodings, NaN, huge numbers, 100,000 levels",
        "4xx; other requests wait for at most 10 ms",
    ),
    15: Row(
        "`model` twice, escaped, in the query, in look-alike letters",
        "the dispatched request is always the authorized one",
    ),
    16: Row(
        "Every forbidden field: at the top, nested, inside `extra_body`",
        "absent at the server, or a 400",
    ),
    17: Row(
        "Paths with dots, escapes, double slashes, absolute forms; no `Host`, two, or an invalid one",
        "404 or 400",
    ),
    18: Row(
        "Every route without a key, and with an invalid, expired and foreign key",
        "401 or 404",
    ),
    19: Row(
        "Hop-by-hop headers, cookies, forged request IDs",
        "the server sees only the gateway's own headers; IDs are unique",
    ),
    20: Row(
        "A marked key and prompt, with debug logs and forced tracebacks",
        "in no output of any process",
    ),
    21: Row(
        "Keys are revoked and rotated under load",
        "within a second; no valid key is rejected",
    ),
    22: Row(
        "Invalid, half-written and missing configuration; 1,000 reloads under 500 streams",
        "the old configuration serves, and metrics show it; no stream is affected",
    ),
    23: Row(
        "SIGTERM under 500 streams",
        "no stream is truncated within the drain time; the rest get an error event",
    ),
    24: Row(
        "The gateway, or a worker, is killed (kill -9)",
        "no server is orphaned; streams of other workers continue; restarted within 2 s",
    ),
    25: Row(
        "A server that crashes in a loop, has its port in use, floods its log, ignores SIGTERM",
        "growing delays, a clear reason, bounded logs, SIGKILL at the deadline",
    ),
    26: Row(
        "Ten times the servers' capacity",
        "a bounded queue; rejections within 50 ms; 90% of the capacity is used",
    ),
    27: Row(
        "One key that sends without pause",
        "the other keys lose at most 10%",
    ),
    28: Row(
        "No file descriptors left, a full disk, a clock that jumps",
        "the gateway continues to serve, and recovers",
    ),
    29: Row(
        "A hostile server: events of 1 GB, invalid chunks, forged and endless headers",
        "bounded memory; a 502, or an error event at the end of the stream",
    ),
    30: Row(
        "An error as the first event of a stream; a response that the engine aborted",
        "its real status; counted as a failure",
    ),
    31: Row(
        "100,000 streams, cut at random; random bytes through the event splitter",
        "the same bytes come out; no crash",
    ),
    32: Row(
        "100,000 random model names and keys",
        "no additional series, no additional memory",
    ),
    33: Row(
        "All faults mixed, for ten minutes",
        "memory does not grow; descriptors and requests in flight return to their initial numbers",
    ),
    34: Row(
        "Ten clients that continuously send the most expensive bodies of 20 MiB",
        "99 of 100 requests of another client have their first byte within 1.5 s; no worker is replaced",
    ),
    35: Row(
        "Keys of the store are created and revoked on one of two gateways under load",
        "in force on the other within a second; no request fails",
    ),
    36: Row(
        "The store's database is killed, cut off, or replaced by its standby; a disk is full; control is killed during changes",
        "no acknowledged change is lost, none is half done; known keys never fail",
    ),
}
