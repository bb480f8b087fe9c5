"""The rows of the matrix of faults: what is provoked, and what has to hold then."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One fault and its bar."""

    fault: str
    expected: str


ROWS: dict[int, Row] = {
    1: Row(
        "The server is killed (kill -9) under 1,000 streams",
        "none hangs after 5 s; every stream ends as clients understand it; no record is lost",
    ),
    2: Row("A stream is cut, at every byte of it", "a client never sees a part of an event"),
    3: Row("The server dies before its first event", "another server, where nothing can have run, or a 502; never a 200"),
    4: Row(
        "The server is frozen, and goes on later",
        "the idle timeout, within a second, as an error event; what comes later reaches nobody else",
    ),
    5: Row("Connections are refused, or the server's backlog is full", "another server or a 502 within 2.1 s"),
    6: Row("100,000 POSTs on connections that the server takes for idle and closes", "no error, none run twice"),
    7: Row("10,000 clients leave, in every state", "the server sees it, 99 of 100 within 200 ms; no connection or slot is left"),
    8: Row("1,000 slow readers of a fast stream", "memory grows by less than 256 MiB; others are not slowed by more than twice"),
    9: Row("A client stops reading", "its slot is free within 65 s"),
    10: Row(
        "5,000 clients with slow heads, 5,000 that say nothing, slow bodies", "closed in time; others are not slowed by more than twice"
    ),
    11: Row("Bodies beyond the limit, sized and chunked; 100 large ones at once", "413; memory stays bounded"),
    12: Row("Heads of 64 KiB, and of 1,000 headers", "431"),
    13: Row(
        "Framing that two parsers could read differently; pipelining", "400 and the end of the connection; no request more at the server"
    ),
    14: Row("Broken compressed bodies, other encodings, NaN, huge numbers, 100,000 levels", "4xx; nobody else waits for more than 10 ms"),
    15: Row("`model` twice, escaped, in the query, in look-alike letters", "what is sent is what was authorized, always"),
    16: Row("Every forbidden field: at the top, nested, inside `extra_body`", "absent at the server, or a 400"),
    17: Row("Paths with dots, escapes and double slashes, absolute ones; no Host, two, or a bad one", "404 or 400"),
    18: Row("Every route with no key, and with a bad, an expired and a foreign one", "401 or 404"),
    19: Row("Hop-by-hop headers, cookies, forged request ids", "the server sees the gateway's own headers only; ids are unique"),
    20: Row("A marked key and prompt, with debug logs and forced tracebacks", "in no output of any process"),
    21: Row("Keys are revoked and rotated under load", "within a second; no valid key is refused"),
    22: Row(
        "Bad, half-written and missing configuration; 1,000 reloads under 500 streams",
        "the old one serves, and metrics say so; no stream is harmed",
    ),
    23: Row("SIGTERM under 500 streams", "none is cut within the grace; the rest are told"),
    24: Row("The gateway, or a worker, is killed (kill -9)", "no server is orphaned; other workers' streams live on; back within 2 s"),
    25: Row(
        "A server that crashes in a loop, has its port taken, floods its log, ignores SIGTERM",
        "growing pauses, a clear reason, bounded logs, SIGKILL at the deadline",
    ),
    26: Row("Ten times the load that the servers can take", "a bounded queue; refusals within 50 ms; 90% of the capacity still serves"),
    27: Row("One key that asks without end", "the others lose 10% at most"),
    28: Row("No file descriptors left, a full disk, a clock that jumps", "it serves on, and recovers"),
    29: Row(
        "A hostile server: events of 1 GB, bad chunks, forged and endless heads",
        "bounded memory; a 502, or the end of a stream that says so",
    ),
    30: Row("An error as the first event of a stream; an answer that the engine aborted", "its real status; counted as a failure"),
    31: Row("100,000 streams, cut at random; random bytes through the splitter", "the same bytes come out; no crash"),
    32: Row("100,000 random model names and keys", "no series more, no memory more"),
    33: Row("All of it mixed, for ten minutes", "memory does not grow; descriptors and requests in flight are back at where they began"),
    34: Row(
        "Ten clients that send the most expensive bodies of 20 MiB, without end",
        "99 of 100 requests of another client have their first byte within 1.5 s; no worker is replaced",
    ),
}
