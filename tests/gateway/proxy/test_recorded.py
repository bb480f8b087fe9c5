"""Recorded requests: what is stored of them, what their clients get, and what the others cost."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.recording.encryption import Encryption
from gateway.recording.redaction import MARK
from gateway.snapshot.snapshot import Mirror, Recording
from gateway.system.compiled_core import core
from gateway.telemetry.metrics import RECORD_RESULTS
from tests.gateway.test_cost import counted
from tests.support.exchange import CHUNKS, Exchange, exchange
from tests.support.ports import refusing
from tests.support.running import Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import (
    COMPLETION,
    COUNT,
    DONE,
    EVENTS,
    HELLO,
    ROLE,
    SHOWN,
    STOP,
    Reply,
    chat,
    client,
    delta,
    request,
    request_once,
)

HEADER = "x-vllm-gateway-recorded"
EACH = {HEADER, "x-request-id", "date"}
"""Headers that differ from request to request."""


async def responds(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        for event in EVENTS:
            await talk.chunk(event)
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


def recording(folder: Path, **more: Any) -> Recording:
    return Recording(str(folder), **{"share": 1.0, **more})


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def records(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(path.read_bytes()) for path in files(folder)]


def results(served: Served) -> dict[str, float]:
    return {name: count for name in RECORD_RESULTS if (count := served.value("recorded_requests_total", name))}


async def settled(served: Served, count: int) -> None:
    await until(lambda: sum(results(served).values()) == count)


def streamed(record: dict[str, Any]) -> bytes:
    """Return the body of a recorded stream."""
    return "".join(each["text"] for each in record["response"]["events"]).encode()


async def test_a_request_is_recorded_with_both_bodies(tmp_path: Path) -> None:
    async with scripted(responds) as server, serving([model(server.port)], recording=recording(tmp_path)) as served:
        body = orjson.dumps(chat(extra_body={"top_k": 5}))
        reply = await request_once(served.port, request(body))
        await settled(served, 1)
    (record,) = records(tmp_path)
    assert (reply.headers[HEADER], reply.body) == ("true", COMPLETION)
    assert record["id"] == reply.headers["x-request-id"]
    assert record["request"] == {"text": body.decode()}
    assert orjson.loads(record["sent"]["text"])["top_k"] == 5
    assert record["response"] == {"status": 200, "text": COMPLETION.decode()}
    assert (record["key"], record["model"], record["server"]) == ("team-a", "tiny", "tiny#0")
    assert record["usage"]["completion"] == 2


async def test_a_stream_is_recorded_with_the_times_of_its_events(tmp_path: Path) -> None:
    async with scripted(responds) as server, serving([model(server.port)], recording=recording(tmp_path)) as served:
        reply = await request_once(served.port, request(chat(stream=True)))
        await settled(served, 1)
    (record,) = records(tmp_path)
    assert streamed(record) == reply.body == b"".join(SHOWN)
    times = [each["at"] for each in record["response"]["events"]]
    assert times == sorted(times)
    assert 0.0 < times[0] <= times[-1] <= record["duration"]


async def test_a_file_has_its_name_from_the_id_and_is_private(tmp_path: Path) -> None:
    async with scripted(responds) as server, serving([model(server.port)], recording=recording(tmp_path / "records")) as served:
        reply = await request_once(served.port, request())
        await settled(served, 1)
    (file,) = files(tmp_path)
    assert (file.stem, file.suffix) == (reply.headers["x-request-id"], ".json")
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]


# The bytes for clients


@given(st.lists(st.text(max_size=20), max_size=6), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_a_recorded_client_gets_the_same_bytes(texts: list[str], whole: bool, with_usage: bool) -> None:
    """Compare the responses to a recorded key and to another key, byte by byte, apart from the headers that differ for each request."""

    async def streams(talk: Conversation) -> None:
        events = [ROLE, *(delta(orjson.dumps({"content": text}).decode()) for text in texts), STOP]
        events += [COUNT, DONE] if with_usage else [DONE]
        await talk.begin_stream()
        for data in [b"".join(events)] if whole else events:
            await talk.chunk(data)
        await talk.end_stream()

    async def both(folder: Path) -> tuple[Reply, Reply]:
        keys = (key("recorded", "sk-recorded"), key("other", "sk-other"))
        body = chat(stream=True, stream_options={"include_usage": with_usage})
        rules = recording(folder, keys=("recorded",))
        async with scripted(streams) as server, serving([model(server.port)], keys, recording=rules) as served:
            replies = [await request_once(served.port, request(body, token=token)) for token in ("sk-recorded", "sk-other")]
            await settled(served, 1)
        return replies[0], replies[1]

    with TemporaryDirectory() as folder:
        first, second = asyncio.run(both(Path(folder)))
        (record,) = records(Path(folder))
    assert first.body == second.body == streamed(record)
    assert first.headers[HEADER] == "true"
    common = [{name: value for name, value in reply.headers.items() if name not in EACH} for reply in (first, second)]
    assert common[0] == common[1]


async def of_rules(one: Exchange, rules: Recording | None, *, stream: bool) -> dict[str, float]:
    """Return the steps of a request, or of a chunk, by function, while requests are recorded by these rules."""
    if rules is not None:
        one.record_bodies(rules)
    if stream:
        one.stream()
    functions = counted(partial(one.receive, cycle(zip(CHUNKS, CHUNKS, strict=True))) if stream else one.serve)
    one.stop_recording()
    return {name: each.steps for name, each in functions.items()}


def steps(rules: Recording | None, *, stream: bool = False) -> dict[str, float]:
    async def run() -> dict[str, float]:
        async with exchange() as one:
            return await of_rules(one, rules, stream=stream)

    return asyncio.run(run())


@pytest.mark.skipif(core() == "compiled", reason="the compiled core has no steps in these files")
def test_a_recorded_stream_takes_the_fast_path(tmp_path: Path) -> None:
    found = " ".join(steps(recording(tmp_path), stream=True))
    assert all(file in found for file in ("fast_path.py", "recorded.py", "capture.py"))
    assert "response.py" not in found


# Which requests are recorded


async def test_only_the_selected_keys_and_models_are_recorded(tmp_path: Path) -> None:
    keys = (key("eval-1", "sk-eval"), key("people", "sk-people"))
    rules = recording(tmp_path, keys=("eval-*",), models=("tiny",))
    async with scripted(responds) as server:
        models = [model(server.port), model(server.port, identity="other", served="tiny")]
        async with serving(models, keys, recording=rules) as served:
            found = {
                (token, name): HEADER in (await request_once(served.port, request(chat(model=name), token=token))).headers
                for token in ("sk-eval", "sk-people")
                for name in ("tiny", "other")
            }
            await settled(served, 1)
    assert [which for which, is_recorded in found.items() if is_recorded] == [("sk-eval", "tiny")]
    assert [(record["key"], record["model"]) for record in records(tmp_path)] == [("eval-1", "tiny")]


async def test_the_header_and_the_files_agree_on_a_share(tmp_path: Path) -> None:
    async with scripted(responds) as server, serving([model(server.port)], recording=recording(tmp_path, share=0.5)) as served:
        replies = [await request_once(served.port, request()) for _ in range(40)]
        chosen = {reply.headers["x-request-id"] for reply in replies if HEADER in reply.headers}
        await settled(served, len(chosen))
    assert {record["id"] for record in records(tmp_path)} == chosen


async def test_an_error_is_recorded(tmp_path: Path) -> None:
    async def refuses(talk: Conversation) -> None:
        await talk.respond(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', "400 Bad Request")

    async with scripted(refuses) as server, serving([model(server.port)], recording=recording(tmp_path)) as served:
        reply = await request_once(served.port, request())
        await settled(served, 1)
    (record,) = records(tmp_path)
    assert (reply.status, reply.headers[HEADER]) == (400, "true")
    assert (record["response"]["status"], record["response"]["text"].encode()) == (400, reply.body)


async def test_a_request_that_is_refused_before_it_may_be_sent_is_not_recorded(tmp_path: Path) -> None:
    async with scripted(responds) as server, serving([model(server.port)], recording=recording(tmp_path)) as served:
        bodies: tuple[object, ...] = (b"{", chat(model="unknown"), chat(n=10**6))
        replies = [await request_once(served.port, request(body)) for body in bodies]
        replies.append(await request_once(served.port, request(token="sk-wrong")))
    assert all(reply.status >= 400 and HEADER not in reply.headers for reply in replies)
    assert files(tmp_path) == []


async def test_a_fallback_is_recorded_with_the_body_that_was_sent(tmp_path: Path) -> None:
    async with scripted(responds) as server:
        with refusing() as port:
            models = [model(port, fallbacks=("other",)), model(server.port, identity="other")]
            async with serving(models, recording=recording(tmp_path, models=("tiny",))) as served:
                reply = await request_once(served.port, request())
                await settled(served, 1)
    (record,) = records(tmp_path)
    assert (reply.headers[HEADER], reply.headers["x-vllm-gateway-fallback"]) == ("true", "other")
    assert (record["model"], record["requested_model"]) == ("other", "tiny")
    assert orjson.loads(record["sent"]["text"])["model"] == "other"


async def test_a_mirrored_request_is_recorded_and_its_copy_is_not(tmp_path: Path) -> None:
    async with scripted(responds) as server, scripted(responds) as other:
        models = [model(server.port, mirror=Mirror("other", 1.0, 16)), model(other.port, identity="other")]
        async with serving(models, recording=recording(tmp_path)) as served:
            reply = await request_once(served.port, request())
            await settled(served, 1)
            await until(lambda: served.value("mirrored_requests_total", "tiny", "other", "completed") == 1)
            assert results(served) == {"stored": 1}
    assert [record["id"] for record in records(tmp_path)] == [reply.headers["x-request-id"]]


async def test_a_client_that_disconnects_is_recorded(tmp_path: Path) -> None:
    async def hangs(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE)
        await talk.chunk(HELLO)
        await talk.closed_by_peer()

    async with scripted(hangs) as server, serving([model(server.port)], recording=recording(tmp_path)) as served:
        async with client(served.port) as one:
            one.send(request(chat(stream=True)))
            await one.events(2)
        await settled(served, 1)
    (record,) = records(tmp_path)
    assert (record["incomplete"], record["response"]["status"]) == ("client", 499)
    assert streamed(record) == ROLE + HELLO


# Secrets

SECRETS = ("sk-a-hidden-key", "hidden-header", "hidden-user", "hidden-content", "hidden-answer", "hidden-server-key")
ENCRYPTION_KEY = bytes(range(32))


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_key_a_header_or_a_redacted_field_is_in_any_file(tmp_path: Path, encrypted: bool, stream: bool) -> None:
    """Search all bytes of the folder, names included, as stored and decrypted."""

    async def echoes(talk: Conversation) -> None:
        text = orjson.dumps({"content": "hidden-answer hidden-content"}).decode()
        if stream:
            await talk.begin_stream()
            events = ROLE + delta(text) + STOP + DONE
            for start in range(0, len(events), 31):  # cut anywhere
                await talk.chunk(events[start : start + 31])
            await talk.end_stream()
        else:
            await talk.respond(b'{"choices":[{"message":' + text.encode() + b'}],"user":"hidden-user"}')

    body = chat(
        stream=stream,
        user="hidden-user",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hidden-content"}]}],
        extra_body={"metadata": {"email": "hidden-user"}},
        guided_regex="hidden-user",
    )
    rules = recording(
        tmp_path,
        redact=("user", "content", "metadata.email", "guided_regex"),
        encryption_keys=(ENCRYPTION_KEY,) if encrypted else (),
    )
    headers = ("x-custom: hidden-header", "cookie: hidden-header", "traceparent: hidden-header")
    async with scripted(echoes) as server:
        one = model(server.port)
        one = replace(one, servers=tuple(replace(spec, api_key="hidden-server-key") for spec in one.servers))
        async with serving([one], [key("team-a", "sk-a-hidden-key")], recording=rules) as served:
            reply = await request_once(served.port, request(body, token="sk-a-hidden-key", extra=headers))
            await settled(served, 1)
            assert results(served) == {"stored": 1}
    assert b"hidden-answer" in reply.body
    (file,) = files(tmp_path)
    stored = [str(file).encode(), file.read_bytes()]
    if encrypted:
        stored.append(Encryption([ENCRYPTION_KEY]).decrypt(file.name.partition(".")[0], file.read_bytes()))
    digest = hashlib.sha256(b"sk-a-hidden-key")
    searched = [*(secret.encode() for secret in SECRETS), digest.digest(), digest.hexdigest().encode(), base64.b64encode(digest.digest())]
    assert [secret for secret in searched for data in stored if secret in data] == []
    assert MARK.encode() in stored[-1]


PATHS = st.sampled_from(
    ["../../../../tmp/escaped", "a/b", "\x00", "\x1b[31m", "\u202e", "x" * 5000, "C:\\con", "%2e%2e%2f", '"}', "\n\r\n\r\n"]
)


@given(PATHS | st.text(max_size=30), st.sampled_from(["user", "session_id", "custom"]))
@settings(max_examples=25)
def test_hostile_values_stay_inside_of_their_record(text: str, name: str) -> None:
    """No value of a request decides about a name, and each value of its body is stored as it was sent."""
    body = orjson.dumps({**chat(messages=[{"role": "user", "content": text}]), name: text})

    async def run(folder: Path) -> Reply:
        async with scripted(responds) as server, serving([model(server.port)], recording=recording(folder / "in")) as served:
            reply = await request_once(served.port, request(body, extra=("x-request-id: ../../escaped",)))
            await settled(served, 1)
            return reply

    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        reply = asyncio.run(run(folder))
        (file,) = files(folder)
        assert file.relative_to(folder).parts[0] == "in"
        assert file.stem == reply.headers["x-request-id"]
        assert records(folder)[0]["request"]["text"].encode() == body


# Cost


def test_a_request_that_is_not_recorded_costs_nothing_more(tmp_path: Path) -> None:
    """While another model is recorded, a request costs the same. With another key of a recorded model, it costs one look-up.

    Its bound was set to 10% above its 89 steps.
    """
    off = sum(steps(None).values())
    assert sum(steps(recording(tmp_path, models=("another",))).values()) == off
    assert off < sum(steps(recording(tmp_path, keys=("another",))).values()) < off + 98
    assert files(tmp_path) == []


def test_a_chunk_that_is_not_recorded_costs_nothing_more(tmp_path: Path) -> None:
    assert steps(recording(tmp_path, keys=("another",)), stream=True) == steps(None, stream=True)
