"""TLS on the data port: what clients see of it, and certificates that are renewed under them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.snapshot.snapshot import Clients
from gateway.system.tls import Certificate, CertificateError, Tls
from tests.support.certificates import certificate
from tests.support.process import configuration, gateway, launched
from tests.support.running import KEY, Served, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, EVENTS, SHOWN, Client, chat, request


def tls(folder: Path) -> Tls:
    return Tls(str(folder / "cert.pem"), str(folder / "key.pem"))


def trusting(cert: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=cert)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@asynccontextmanager
async def tls_client(port: int, cert: Path) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(cert), server_hostname="localhost", limit=1 << 24)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def respond(talk: Conversation) -> None:
    if not talk.request.json.get("stream"):
        await talk.respond(COMPLETION)
        return
    await talk.begin_stream()
    for event in EVENTS:
        await talk.chunk(event)
    await talk.end_stream()


def _subject(one: Client) -> object:
    (((_, name),),) = one.writer.get_extra_info("peercert")["subject"]
    return name


async def test_requests_and_streams(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    async with scripted(respond) as server, serving([model(server.port)], tls=tls(tmp_path)) as served:
        async with tls_client(served.port, cert) as one:
            spoken = one.writer.get_extra_info("ssl_object")
            assert spoken.selected_alpn_protocol() == "http/1.1" and spoken.version() == "TLSv1.3"
            assert (await one.request(request())).body == COMPLETION
            assert (await one.request(request(chat(stream=True)))).body == b"".join(SHOWN)
            one.send(request() * 3)
            for _ in range(3):
                assert (await one.reply()).body == COMPLETION
        await until(lambda: not served.connections)


async def test_old_versions_and_plain_text_are_refused(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    async with serving([model(1)], tls=tls(tmp_path)) as served:
        old = trusting(cert)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=old, server_hostname="localhost")
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.transport.abort()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request())
        async with asyncio.timeout(10):
            assert b"HTTP" not in await reader.read()
        writer.close()


async def test_a_handshake_that_is_not_finished_ends(tmp_path: Path) -> None:
    certificate(tmp_path)
    async with serving([model(1)], tls=tls(tmp_path), clients=Clients(headers_timeout=0.5)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


async def test_a_disconnect_cancels_the_request(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    left = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(EVENTS[0])
        await talk.closed_by_peer()
        left.set()

    async with scripted(script) as server, serving([model(server.port)], tls=tls(tmp_path)) as served:
        async with tls_client(served.port, cert) as one:
            one.send(request(chat(stream=True)))
            await one.reader.readuntil(EVENTS[0])
        async with asyncio.timeout(10):
            await left.wait()
        await until(lambda: served.in_flight == 0)
        assert served.context.records[0].incomplete == "client"


async def test_a_slow_reader_slows_its_server_down_and_is_cut(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path)
    sent = 0

    async def flood(talk: Conversation) -> None:
        nonlocal sent
        await talk.begin_stream()
        while True:
            await talk.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536

    async with scripted(flood) as server, serving([model(server.port)], tls=tls(tmp_path), clients=Clients(write_timeout=2)) as served:
        async with tls_client(served.port, cert) as one:
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]  # every transport here reads
            one.send(request(chat(stream=True)))
            await until(lambda: served.in_flight > 0)
            await until(lambda: served.in_flight == 0 and server.open == 0, 30)
        assert sent < 32 << 20, "what the sockets hold, and a little"
        assert served.context.records[0].incomplete == "client"


async def test_a_connection_above_the_bound_of_its_address_is_cut(tmp_path: Path) -> None:
    """A response would need a handshake first."""
    cert, _ = certificate(tmp_path)
    async with (
        scripted(respond) as server,
        serving([model(server.port)], tls=tls(tmp_path), clients=Clients(max_per_address=1)) as served,
        tls_client(served.port, cert) as one,
    ):
        assert (await one.request(request())).status == 200
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            async with tls_client(served.port, cert) as other:
                await other.request(request())
        assert served.value("client_faults_total", "too_many") == 1
        assert (await one.request(request())).status == 200


# Renewal


async def test_a_renewed_certificate_is_presented_and_connections_stay(tmp_path: Path) -> None:
    first, _ = certificate(tmp_path, "first")
    old = shutil.copy(first, tmp_path / "old.pem")
    async with (
        scripted(respond) as server,
        serving([model(server.port)], tls=tls(tmp_path)) as served,
        tls_client(served.port, Path(old)) as stays,
    ):
        assert _subject(stays) == "first"
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        for file in certificate(fresh, "second"):
            os.replace(file, tmp_path / file.name)
        await _presents(served, tmp_path / "cert.pem", "second")
        assert (await stays.request(request())).status == 200, "who was connected stays so"


async def _presents(served: Served, cert: Path, name: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                async with tls_client(served.port, cert) as one:
                    assert _subject(one) == name
                    assert (await one.request(request())).status == 200
                    return
            except ssl.SSLError:
                await asyncio.sleep(0.1)


async def test_files_that_are_written_again_unchanged_renew_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in certificate(tmp_path, "first"):
        assert file.exists()
    presented = Certificate(tls(tmp_path))
    with caplog.at_level(logging.WARNING, "vllm_gateway"):
        for file in (tmp_path / "cert.pem", tmp_path / "key.pem"):
            copy = shutil.copy(file, tmp_path / "copy")
            os.replace(copy, file)
        presented.reload(tls(tmp_path))
        assert caplog.text == ""
        certificate(tmp_path, "second")
        presented.reload(tls(tmp_path))
        assert "the certificate was renewed" in caplog.text


@pytest.mark.parametrize("broken", ["another key", "no PEM", "gone"])
async def test_a_broken_pair_is_not_taken(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    cert, key = certificate(tmp_path, "first")
    good = tmp_path / "good"
    good.mkdir()
    shutil.copy(cert, good)
    async with scripted(respond) as server, serving([model(server.port)], tls=tls(tmp_path)) as served:
        if broken == "another key":
            other = tmp_path / "other"
            other.mkdir()
            os.replace(certificate(other)[1], key)
        elif broken == "no PEM":
            cert.write_text("half a certifi")
        else:
            cert.unlink()
        await until(lambda: "the old one stays" in caplog.text, 20)
        await _presents(served, good / "cert.pem", "first")
        for file in certificate(tmp_path, "second"):
            assert file.exists()
        await _presents(served, cert, "second")


def test_a_locked_key_does_not_prompt(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    command = ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(tmp_path / "locked.pem")]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(CertificateError, match="locked with a password"):
        Certificate(Tls(str(cert), str(tmp_path / "locked.pem")))


# The whole gateway


def test_real_clients(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    settings: dict[str, Any] = configuration(launched("sim/one"), tls={"cert": str(cert), "key": str(key)})
    with gateway(tmp_path, settings) as running:
        assert "requests  https://" in running.output
        body = json.dumps(chat(model="sim/one"))
        command = ["curl", "-sS", "--fail", "--cacert", str(cert), "-w", "%{http_version} %{ssl_verify_result}", "-o", os.devnull,
                   f"https://localhost:{running.data}/v1/chat/completions", "-H", f"authorization: Bearer {KEY}",
                   "-H", "content-type: application/json", "-d", body]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("1.1 0", "")
        http = openai.DefaultHttpxClient(verify=trusting(cert), trust_env=False)
        with openai.OpenAI(base_url=f"https://localhost:{running.data}/v1", api_key=KEY, http_client=http, max_retries=0) as sdk:
            completion = sdk.chat.completions.create(model="sim/one", messages=[{"role": "user", "content": "Hello"}])
            assert completion.choices[0].message.content
            stream = sdk.chat.completions.create(model="sim/one", messages=[{"role": "user", "content": "Hello"}], stream=True)
            assert len(list(stream)) > 2
        with socket.create_connection(("127.0.0.1", running.data)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            plain.settimeout(20)
            assert b"200" not in plain.recv(100)
