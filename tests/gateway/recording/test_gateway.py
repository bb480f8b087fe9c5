"""Records of a running gateway: read and replayed by commands, in a folder and in a bucket, also while the store fails."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.cli.record_commands import KEY_VARIABLE
from tests.gateway.recording.test_stores import NEEDS_S3
from tests.support import full_disk
from tests.support.full_disk import Disk
from tests.support.ports import reserved
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY
from tests.support.s3_server import CREDENTIALS, s3_server

HEADER = "x-vllm-gateway-recorded"


def config(folder: Path, **record: Any) -> dict[str, Any]:
    (folder / "record-key").write_bytes(base64.b64encode(bytes(range(32))) + b"\n")
    (folder / "client-key").write_text(KEY + "\n")
    own = configuration(launched(), launched("sim/two"), workers=2)
    return own | {"record": {"store": "records", "share": "100%", "key": {"file": "record-key"}, **record}}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("recorded")
    with gateway(folder, config(folder, redact=["metadata.email"])) as running:
        yield running


def stored(one: Gateway, result: str = "stored") -> float:
    return one.metric(f'vllm_gateway_recorded_requests_total{{result="{result}"}}')


def recorded(one: Gateway, **body: Any) -> httpx2.Response:
    """Send a request, and wait until its record is stored."""
    before = stored(one)
    response = one.request(**body)
    assert (response.status_code, response.headers[HEADER]) == (200, "true")
    wait_for(lambda: stored(one) > before)
    return response


def shown(one: Gateway, identity: str) -> dict[str, Any]:
    result = one.command("record", "show", identity)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def replayed(one: Gateway, identity: str, *options: str) -> subprocess.CompletedProcess[str]:
    return one.command("replay", identity, "--url", one.url, "--key-file", str(one.folder / "client-key"), *options)


def test_a_record_is_shown(one: Gateway) -> None:
    response = recorded(one, metadata={"email": "someone@example.com", "case": "7"})
    record = shown(one, response.headers["x-request-id"])
    assert record["request"]["text"]["metadata"] == {"email": "[redacted]", "case": "7"}
    assert record["response"]["text"] == response.json()
    assert (record["key"], record["model"], record["redacted"]) == ("team-a", "sim/one", True)
    assert all(b"sim/one" not in path.read_bytes() for path in (one.folder / "records").rglob("*.enc"))


def test_a_request_is_replayed_on_another_model(one: Gateway) -> None:
    for stream in (False, True):
        identity = recorded(one, stream=stream, max_tokens=8).headers["x-request-id"]
        result = replayed(one, identity, "--model", "sim/two", "--json")
        assert result.returncode == 0, result.stderr
        outcome = json.loads(result.stdout)
        before, after = outcome["recorded"], outcome["replayed"]
        assert (before["id"], before["model"], after["model"]) == (identity, "sim/one", "sim/two")
        assert (before["status"], after["status"]) == (200, 200)
        assert after["usage"] is None if stream else after["usage"]["completion"] == 8  # a stream reports no usage unless that is requested
        assert outcome["same"]["status"]
        assert shown(one, after["id"])["model"] == "sim/two"  # it is an ordinary request, and recorded as such


def test_the_difference_is_shown_in_words(one: Gateway) -> None:
    identity = recorded(one).headers["x-request-id"]
    result = replayed(one, identity, "--model", "unknown")
    assert result.returncode == 0, result.stderr
    assert "Status: 200 recorded, 404 now." in result.stdout
    assert "Error (now): The model `unknown` does not exist" in result.stdout


def test_without_a_key_the_gateway_refuses_the_replay(one: Gateway) -> None:
    identity = recorded(one).headers["x-request-id"]
    result = one.command("replay", identity, "--url", one.url, "--json")
    assert KEY_VARIABLE not in result.stderr
    assert json.loads(result.stdout)["replayed"]["status"] == 401


@pytest.mark.parametrize("identity", ["../../gateway.yaml", "req_x", "req_" + "0" * 24])
def test_another_id_is_one_line_on_stderr(one: Gateway, identity: str) -> None:
    for command in (("record", "show"), ("replay",)):
        result = one.command(*command, identity)
        assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)


def test_the_commands_need_the_setting(tmp_path: Path) -> None:
    folder = tmp_path
    with gateway(folder, {key: value for key, value in config(folder).items() if key != "record"}) as running:
        assert HEADER not in running.request().headers
        result = running.command("record", "show", "req_" + "0" * 24)
    assert (result.returncode, "set record" in result.stderr) == (1, True)
    assert not (folder / "records").exists()


@NEEDS_S3
def test_a_bucket_that_fails_stops_the_records_and_not_the_requests(tmp_path: Path) -> None:
    (tmp_path / "id").write_text(CREDENTIALS[0])
    (tmp_path / "secret").write_text(CREDENTIALS[1])
    credentials = {"access_key_id": {"file": "id"}, "secret_access_key": {"file": "secret"}}
    with reserved() as port:
        own = config(tmp_path, store=f"http://127.0.0.1:{port}/records/a", **credentials)
        with s3_server(port):
            started = gateway(tmp_path, own)
            with started as one:
                identity = recorded(one).headers["x-request-id"]
                assert shown(one, identity)["model"] == "sim/one"
                one.request()
        # The gateway has ended with the server; a second one starts without a bucket.
        with gateway(tmp_path, own) as one:
            response = one.request()
            assert (response.status_code, response.headers[HEADER]) == (200, "true")
            wait_for(lambda: stored(one, "store_failed"), seconds=90)
            assert one.output.count("requests are not recorded: the bucket") == 1
            with s3_server(port):
                wait_for(lambda: one.request().status_code == 200 and stored(one), seconds=120)
            assert CREDENTIALS[1] not in one.output + one.log


@pytest.mark.skipif(not full_disk.allowed(), reason=full_disk.NOT_ALLOWED)
def test_a_full_disk_stops_the_records_and_not_the_requests(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    own = config(tmp_path, store=str(folder / "records"))
    with gateway(tmp_path, own, line=full_disk.line(tmp_path, folder)) as one:
        disk = Disk(one, folder)
        recorded(one)
        disk.fill()
        response = one.request(messages=[{"role": "user", "content": "x" * 20000}])
        assert (response.status_code, response.headers[HEADER]) == (200, "true")
        wait_for(lambda: stored(one, "store_failed"))
        assert one.request().status_code == 200
        disk.free()
        before = stored(one)
        wait_for(lambda: one.request().status_code == 200 and stored(one) > before, seconds=90)
        assert "No space left on device" in one.output
