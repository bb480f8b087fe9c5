"""Forms as a server reads them, and as the gateway writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartParser

from gateway.auth.body_policy import FORBIDDEN, BodyPolicy
from gateway.proxy.form import Form
from gateway.snapshot.snapshot import BodyRules

_T = TypeVar("_T")
Read = str | tuple[str | None, str | None, bytes]
"""A text; of a file its name, content type and data."""


def read(content_type: str | bytes | None, *pieces: bytes) -> list[tuple[str, Read]]:
    """Read a form with the parser of vLLM's framework. Raises MultiPartException."""

    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def items() -> list[tuple[str, Read]]:
        given = content_type.decode() if isinstance(content_type, bytes) else content_type or ""
        form = await MultiPartParser(Headers({"content-type": given}), stream()).parse()  # type: ignore[arg-type]
        found: list[tuple[str, Read]] = []
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                found.append((name, (value.filename, value.content_type, await value.read())))
                await value.close()
            else:
                found.append((name, value))
        return found

    return run_at_once(items())


def run_at_once(task: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that never waits."""
    try:
        task.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    raise AssertionError("it waits")


@dataclass(frozen=True)
class Sent:
    """The form that the gateway sends for a client's form."""

    model: str | None
    """The model that the client named."""
    content_type: bytes
    body: bytes
    hides_usage: bool


def send(
    boundary: bytes,
    pieces: Iterable[bytes],
    policy: BodyPolicy,
    key_max_tokens: int | None,
    served_model: str,
    content_type: bytes | None = None,
) -> Sent:
    """Return what the gateway sends for a form that arrives in these pieces. ``content_type``: another one. Raises Refusal."""
    arriving = iter(pieces)

    async def next_bytes() -> bytes:
        return next((piece for piece in arriving if piece), b"")

    async def task() -> Sent:
        form = Form.of(content_type or b'multipart/form-data; boundary="%b"' % boundary)
        model = await form.read_model(next_bytes)
        form.apply_policy(policy, key_max_tokens)
        body = bytearray(form.opening(served_model))
        if not form.ended:
            while data := await next_bytes():
                body += form.feed(data)
            body += form.ending()
        return Sent(model, form.content_type, bytes(body), form.hides_usage)

    return run_at_once(task())


RULES = BodyRules(max_tokens=50, refuse=("language",))
KEY_MAX_TOKENS = 40
SERVED = "served"
_POLICY = BodyPolicy(RULES, {}, {})
_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("", "0", "off", "f", "false", "n", "no")


def fields_at_server(boundary: bytes, pieces: Sequence[bytes], read_in: Sequence[int] = ()) -> list[tuple[str, Read]]:
    """Return the fields that a server reads of what the gateway sends, and check that they are the client's, but for the gateway's own.

    ``read_in``: where the server's reads are split. Raises Refusal.
    """
    sent = send(boundary, pieces, _POLICY, KEY_MAX_TOKENS, SERVED)
    cuts = sorted(cut % (len(sent.body) + 1) for cut in read_in)
    found = read(sent.content_type, *(sent.body[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)))
    client = read(b'multipart/form-data; boundary="%b"' % boundary, b"".join(pieces))
    models = [value for name, value in client if name == "model"]
    assert sent.model == (_text(models[0]) if models else None) and len(models) < 2
    expected: list[tuple[str, Read]] = [(name, SERVED if name == "model" else value) for name, value in client]
    if not models:
        expected.append(("model", SERVED))
    last = {name: _text(value) for name, value in client}
    hides_usage = last.get("stream", "").lower() in _TRUE and last.get("stream_include_usage", "").lower() in _FALSE
    if hides_usage:
        expected.append(("stream_include_usage", "true"))
        if "stream_continuous_usage_stats" in last:
            expected.append(("stream_continuous_usage_stats", "false"))
    if not last.get("max_completion_tokens"):
        expected.append(("max_completion_tokens", str(KEY_MAX_TOKENS)))
    assert found == expected, (found, expected)
    assert sent.hides_usage is hides_usage
    assert not {name for name, _ in found} & (FORBIDDEN | set(RULES.refuse))
    limits = {_text(value) for name, value in found if name == "max_completion_tokens"} - {""}
    assert all(limit.isascii() and limit.isdigit() and int(limit) <= KEY_MAX_TOKENS for limit in limits)
    return found


def _text(value: Read) -> str:
    return value if isinstance(value, str) else value[2].decode(errors="replace")
