"""Random forms: a server must read the client's fields of what the gateway sends, and the gateway's own, or the gateway refuses the form.

The rule: the reference is not the gateway. Both forms, the client's and the sent one, are read by the parser of vLLM's framework, and
``fields_at_server`` states the fields that the gateway adds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from time import monotonic

from starlette.formparsers import MultiPartException

from gateway.api.errors import Refusal
from tests.support.forms import Read, fields_at_server

_SHOWN = 10  # differences that a report contains
_BOUNDARIES = (b"B", b"bound", b"a-b", b"--", b"-", b"x" * 69, b"----WebKitFormBoundary7MA4YWxkTrZu0gW")
_NAMES = (
    *(b"model", b"file", b"prompt", b"stream", b"stream_include_usage", b"stream_continuous_usage_stats", b"max_completion_tokens") * 4,
    *(
        b"language",
        b"vllm_xargs",
        b"n",
        b"Model",
        b"model ",
        b" model",
        b"'model'",
        b"model;x",
        b"a; name=model",
        b"a%22b",
        b"m\xc3\xb6del",
    ),
    *(
        b"m\xf6del",
        b"+AG0AbwBkAGUAbA-",
        b'mod\\"el',
        b"mod\\\\el",
        b"model\\",
        b"mod\nel",
        b"a\0",
        b"",
        b'"model',
        b"timestamp_granularities[]",
    ),
)
_VALUES = (b"m", b"true", b"1", b"False", b"", b"10", b"40", b"41", b"0x10", b"1e9", b"\xd9\xa3", b" 1", b"n\r", b"\xff\xfe", b"x" * 50)
_LINES = (
    *(b"Content-Type: text/plain; charset=utf-16\r\n", b"Content-Type: audio/wav\r\n", b"content-type:\t\r\n", b"Content-Type: a\nb\r\n"),
    *(
        b"Content-Transfer-Encoding: base64\r\n",
        b"X: y\r\n",
        b'Content-Disposition: form-data; name="model"\r\n',
        b" folded\r\n",
        b"--B--: x\r\n",
    ),
)

_SPOILED = (
    *(b"; name=%b", b"; name*=utf-8''%b", b'; name="%b"; name="model"', b'; filename="model"; name="%b"', b'; NAME="%b"', b';name="%b"'),
    *(b'; name="a"; name=%b', b'; x="; name=model"; name="%b"', b'; name="%b', b"; name=prompt; name*=utf-8''%b"),
)


@dataclass(frozen=True)
class Report:
    """The result of one run. ``count``: forms; each of them arrived in two ways."""

    seed: int
    count: int
    accepted: int
    refused: int
    seconds: float
    differences: tuple[str, ...]
    """The forms that a server would read otherwise, and how; the first ten."""


def run(seed: int, seconds: float | None, count: int | None) -> Report:
    """Check ``count`` random forms, or as many as ``seconds`` allows. Stops after ten differences."""
    random, began, done, accepted, differences = Random(seed), monotonic(), 0, 0, list[str]()
    multipart_log = logging.getLogger("python_multipart")
    level = multipart_log.level
    multipart_log.setLevel(logging.CRITICAL)  # it reports each invalid form
    try:
        while (count is None or done < count) and (seconds is None or monotonic() - began < seconds) and len(differences) < _SHOWN:
            boundary, body = form(random)
            done += 1
            outcomes = []
            for pieces in (split(random, body), split(random, body)):
                try:
                    outcomes.append(outcome(boundary, pieces, random))
                except (AssertionError, MultiPartException) as error:
                    differences.append(f"{boundary!r} {pieces!r}: {error!r}")
            accepted += any(isinstance(each, list) for each in outcomes)
            if len(outcomes) == 2 and outcomes[0] != outcomes[1]:
                differences.append(f"{boundary!r} {body!r}: depends on the reads: {outcomes!r}")
    finally:
        multipart_log.setLevel(level)
    return Report(seed, done, accepted, done - accepted, monotonic() - began, tuple(differences))


def outcome(boundary: bytes, pieces: Sequence[bytes], random: Random) -> list[tuple[str, Read]] | str:
    """Return the fields that a server reads, or the code of the refusal. Raises AssertionError if they are not the client's fields."""
    try:
        return fields_at_server(boundary, pieces, [random.randrange(1 << 16) for _ in range(random.choice((0, 1, 4)))])
    except Refusal as refusal:
        return refusal.code


def split(random: Random, body: bytes) -> list[bytes]:
    """Return the reads in which a form arrives."""
    if random.random() < 0.03:
        return [body[at : at + 1] for at in range(len(body))]
    cuts = sorted(random.randrange(len(body) + 1) for _ in range(random.choice((0, 1, 3, 8))))
    return [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]


def form(random: Random) -> tuple[bytes, bytes]:
    """Return a boundary and a form with it, often an invalid one."""
    boundary = random.choice(_BOUNDARIES) if random.random() < 0.95 else random.randbytes(random.randrange(1, 20)).hex().encode()
    body = random.choice((b"\r\n", b"preamble\r\n", b"--" + boundary + b" \r\n")) if random.random() < 0.03 else b""
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        line_end = b"\r\n" if random.random() < 0.97 else random.choice((b"\n", b" \r\n", b"--\r\n", b"-\r\n", b"\t\r\n", b" x\r\n"))
        body += b"--" + boundary + line_end + _part(random, boundary)
    if random.random() < 0.97:
        after = b"\r\n--" + boundary + b"\r\n" + _part(random, boundary) + b"--" + boundary + b"--"
        body += b"--" + boundary + b"--" + random.choice((b"\r\n", b"\r\n", b"", b"\r\nepilogue", after))
    if body and random.random() < 0.1:
        at, kind = random.randrange(len(body)), random.randrange(3)
        body = body[:at] + (b"" if kind == 0 else random.choice((b"\r", b"\n", b"-", b'"', b" ", b";", b"\0"))) + body[at + (kind < 2) :]
    return boundary, body


def _part(random: Random, boundary: bytes) -> bytes:
    name, spoils = random.choice(_NAMES), random.random() < 0.2
    options = b'; name="%b"' % name
    if spoils:
        options = random.choice(_SPOILED) % name
    if random.random() < 0.25:
        options += b'; filename="%b"' % random.choice((b"a.wav", b"", b'a\\"b', b"a\\\\b", b"C:\\a\\b", b"\xc3\xa9", b"a;b", *_NAMES))
    header = (
        random.choice((b"content-disposition:", b"CONTENT-DISPOSITION:\t", b"Content-Disposition :"))
        if spoils
        else b"Content-Disposition: "
    )
    lines = [header + random.choice((b"form-data", b"form-data", b"attachment", b"")) + options + b"\r\n"]
    if random.random() < 0.15:
        lines.insert(random.randrange(2), random.choice(_LINES))
    return b"".join(lines) + b"\r\n" + _text(random, boundary) + b"\r\n"


def _text(random: Random, boundary: bytes) -> bytes:
    """Return a value, often similar to a delimiter, at its start too: the headers end with the line break of a delimiter."""
    if random.random() < 0.5:
        return random.choice(_VALUES)
    pieces = (
        b"\r\n",
        b"\r",
        b"\n",
        b"--",
        b"-",
        boundary,
        b"--" + boundary,
        b"\r\n--" + boundary,
        b"--%b--" % boundary,
        b"\r\n\r\n",
        b"x",
        b"\xff",
    )
    cut = b"\r\n--%b--\r\n" % boundary
    return b"".join(random.choice((*pieces, cut[: random.randrange(len(cut))])) for _ in range(random.choice((1, 1, 2, 3, 5))))
