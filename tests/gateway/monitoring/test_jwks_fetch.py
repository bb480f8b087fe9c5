"""Control follows the key sets of identity providers; and the whole gateway with one provider."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.config import Config, ConfigurationError, load
from gateway.monitoring.jwks_fetch import JwksFetcher
from tests.support.certificates import certificate
from tests.support.issuer import AUDIENCE, Issuer, Published, SigningKey, published
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write
from tests.support.running import until


def provider(shown: Published | str, **more: Any) -> dict[str, Any]:
    """Return an entry of `jwt`."""
    name, location = (shown.issuer.name, shown.url) if isinstance(shown, Published) else ("https://login.example.com/", shown)
    return {"issuer": name, "audience": AUDIENCE, "jwks": location, "keys": "staff", **more}


def with_tokens(*providers: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = configuration(launched(), **more)
    config["keys"].append({"id": "staff", "limits": {"requests_per_minute": 3}, "team": "lab", "labels": {"cost": "17"}})
    return config | {"jwt": list(providers), "teams": [{"id": "lab"}, {"id": "ops"}]}


def configured(folder: Path, *providers: dict[str, Any]) -> Config:
    write(folder / "gateway.yaml", with_tokens(*providers))
    return load(folder / "gateway.yaml", {})


class ChangeCounter:
    """Counts the notifications of a change."""

    times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def changes() -> ChangeCounter:
    return ChangeCounter()


@pytest.fixture
async def sets(changes: ChangeCounter) -> AsyncIterator[JwksFetcher]:
    async with aclosing(JwksFetcher(changes)) as followed:
        yield followed


async def test_a_key_set_is_fetched_and_refreshed(tmp_path: Path, sets: JwksFetcher, changes: ChangeCounter) -> None:
    issuer = Issuer()
    with published(issuer) as shown:
        config = configured(tmp_path, provider(shown, refresh="50ms"))
        sets.follow(config)
        assert sets.unfetched() == {issuer.name}
        await until(lambda: not sets.unfetched())
        before = sets.known()[issuer.name]
        assert [key["kid"] for key in json.loads(before)] == [issuer.keys[0].kid]
        await until(lambda: max(shown.responses) > (304, 0.0) and len(shown.responses) > 2)
        assert changes.times == 1, "what is the same is no news"
        issuer.published.append(SigningKey("RS256", "fresh").jwk())
        await until(lambda: changes.times == 2)
        assert len(json.loads(sets.known()[issuer.name])) == 2
        assert list(sets.well()) == [(issuer.name, True)]
        sets.follow(configured(tmp_path, provider(shown, leeway="1s", refresh="1h")))
        assert sets.known(), "what is followed already is not asked anew"
        (tmp_path / "keys.json").write_bytes(issuer.document)
        sets.follow(configured(tmp_path, provider("keys.json")))
        assert not sets.known()


@pytest.mark.parametrize(
    ("status", "document"), [(500, None), (0, None), (301, None), (200, b"no"), (200, b'{"keys": []}'), (200, b"x" * (2 << 20))]
)
async def test_the_last_good_set_stays(tmp_path: Path, sets: JwksFetcher, status: int, document: bytes | None, caplog: Any) -> None:
    class Moody(Issuer):
        other: bytes | None = None

        @property
        def document(self) -> bytes:
            return self.other if self.other is not None else super().document

    issuer = Moody()
    with published(issuer) as shown:
        config = configured(tmp_path, provider(shown, refresh="50ms"))
        sets.follow(config)
        await until(sets.known)
        before = sets.known()
        issuer.other, shown.status = document, status
        await until(lambda: list(sets.well()) == [(issuer.name, False)])
        (row,) = sets.as_json(config)
        assert sets.known() == before
        assert row["problem"] and row["fetched"] <= time.time()
        assert "the last known keys stay in use" in caplog.text
        issuer.other, shown.status = None, 200
        await until(lambda: list(sets.well()) == [(issuer.name, True)])
        assert "can be fetched again" in caplog.text


async def test_keys_in_a_file_are_shown_as_such(tmp_path: Path, sets: JwksFetcher) -> None:
    issuer = Issuer()
    (tmp_path / "keys.json").write_bytes(issuer.document)
    config = configured(tmp_path, provider(str(tmp_path / "keys.json")))
    sets.follow(config)
    (row,) = sets.as_json(config)
    assert (row["keys"], row["problem"], row["fetched"]) == ("file", "", None)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])
async def test_a_proxy_of_an_unknown_kind_is_reported(tmp_path: Path, sets: JwksFetcher, monkeypatch: Any, proxy: str) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    config = configured(tmp_path, provider("http://login.example.com/keys"))
    sets.follow(config)
    await until(lambda: not sets.unfetched())
    assert sets.as_json(config)[0]["problem"]


async def test_refreshes_on_request_are_rate_limited(tmp_path: Path, sets: JwksFetcher) -> None:
    issuer = Issuer()
    with published(issuer) as shown:
        sets.follow(configured(tmp_path, provider(shown, refresh="1h")))
        await until(sets.known)
        for _ in range(100):
            sets.request(issuer.name)
            sets.request("https://unknown.example.com/")
            await asyncio.sleep(0.001)
        await until(lambda: len(shown.responses) == 2, 60)
        assert shown.responses[1][1] - shown.responses[0][1] > 4.5
        assert [status for status, _ in shown.responses] == [200, 304]


async def test_private_certificate_authorities(tmp_path: Path, sets: JwksFetcher) -> None:
    issuer, files = Issuer(), certificate(tmp_path)
    with published(issuer, files) as shown:
        config = configured(tmp_path, provider(shown))
        sets.follow(config)
        await until(lambda: not sets.unfetched())
        assert "CERTIFICATE_VERIFY_FAILED" in sets.as_json(config)[0]["problem"]
        sets.follow(configured(tmp_path, provider(shown, ca="cert.pem")))
        await until(sets.known)


def problems(folder: Path, *providers: dict[str, Any], **more: Any) -> list[str]:
    write(folder / "gateway.yaml", with_tokens(*providers) | more)
    with pytest.raises(ConfigurationError) as raised:
        load(folder / "gateway.yaml", {})
    return [f"{problem.path}: {problem.message}" for problem in raised.value.problems]


def test_problems_that_check_reports(tmp_path: Path) -> None:
    url = "https://login.example.com/keys"
    (tmp_path / "empty.json").write_text('{"keys": []}')
    assert problems(tmp_path, provider("empty.json")) == [f"jwt[0].jwks: the file {tmp_path}/empty.json has no public key for signatures"]
    assert "cannot be read" in problems(tmp_path, provider("missing.json"))[0]
    misspelled = "jwt[0].keys: there is no such entry of keys; did you mean `staff`?"
    assert problems(tmp_path, provider(url, keys="stuff")) == [misspelled], "a mistake is one problem"
    assert problems(tmp_path, provider(url, keys=["staff", "team-a"])) == [
        "jwt[0].keys: set claims.key to select the entry of a token, or write a single entry"
    ]
    assert "this issuer is already on line" in problems(tmp_path, provider(url), provider(url, keys="team-a"))[0]
    assert "subjects of two issuers would be indistinguishable" in problems(tmp_path, provider(url), provider(url) | {"issuer": "b"})[0]
    assert "algorithms" in problems(tmp_path, provider(url, algorithms=["HS256"]))[0]
    assert "algorithms" in problems(tmp_path, provider(url, algorithms=["none"]))[0]
    keys = [{"id": "staff"}, {"id": "staff/alice", "hash": "sha256:" + "a" * 64}, {"id": "any", "anonymous": True}]
    assert "after the ID of its entry" in problems(tmp_path, provider(url), keys=keys)[0]
    assert "need another entry" in problems(tmp_path, provider(url, keys="any"), keys=keys[2:])[0]
    for taken in ("a/b/c", "a%2Fb/c"):
        keys = [{"id": "a/b"}, {"id": taken, "hash": "sha256:" + "a" * 64}]
        assert "after the ID of its entry" in problems(tmp_path, provider(url, keys="a/b"), keys=keys)[0]
    (tmp_path / "keys.json").write_bytes(Issuer().document)
    assert configured(tmp_path, provider("keys.json")).jwt[0].jwks.keys is not None


def test_without_its_packages_the_setting_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(Issuer().document)
    configured(tmp_path, provider("keys.json"))
    program = "import sys; sys.modules['jwt'] = None; from gateway.cli.main import main; main()"
    line = [sys.executable, "-c", program, "check", str(tmp_path / "gateway.yaml")]
    done = subprocess.run(line, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    problem = "jwt[0].issuer: tokens require packages that are not installed: the extra `jwt` (pip install 'vllm-gateway[jwt]')"
    assert problem in done.stdout


def send_chat(one: Gateway, token: str) -> httpx2.Response:
    body = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}]}
    return httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60, verify=False)


def test_the_whole_gateway(tmp_path: Path) -> None:
    issuer = Issuer("https://login.example.com/", SigningKey("ES256", "first"))
    claims = {"team": "groups", "models": "models"}
    with published(issuer, certificate(tmp_path)) as shown:
        config = with_tokens(provider(shown, ca="cert.pem", claims=claims), workers=2) | {"ledger": "sqlite:///usage.db"}
        with gateway(tmp_path, config) as one:
            alice = issuer.token(groups=["ops"])
            responses = [send_chat(one, alice) for _ in range(4)]
            assert [response.status_code for response in responses] == [200, 200, 200, 429], "the entry's limit is each subject's"
            assert responses[0].headers["x-ratelimit-limit-requests"] == "3"
            assert send_chat(one, issuer.token(sub="bob")).status_code == 200
            assert send_chat(one, issuer.token(sub="eve", models="other/*")).json()["error"]["code"] == "model_not_found"
            bad = send_chat(one, issuer.token(aud="another"))
            assert (bad.status_code, bad.headers["www-authenticate"]) == (401, "Bearer")
            assert bad.json()["error"] == {
                "message": "The token is for another audience.", "type": "authentication_error", "param": None, "code": "invalid_api_key"
            }  # fmt: skip
            assert send_chat(one, issuer.token(exp=1)).json()["error"]["code"] == "expired_api_key"
            rotated(one, issuer)
            usable_without_issuer(one, shown)
            assert one.metric('vllm_gateway_tokens_total{key="staff",model="sim/one",type="prompt"}') > 0
            assert one.metric('vllm_gateway_limited_total{key="staff",reason="requests_per_minute"}') == 1
            assert "alice" not in one.get("/metrics").text
            assert one.metric('vllm_gateway_auth_failures_total{reason="expired"}') == 1
            wait_for(lambda: len(usage(tmp_path)) == 3)
            one.stop()
        assert '"key":"staff/alice"' in one.log
        assert alice not in one.log + one.output
    assert usage(tmp_path) == [
        (f"staff/{name}", team, '{"cost": "17"}') for name, team in (("alice", "ops"), ("bob", "lab"), ("carol", "lab"))
    ]


def usage(folder: Path) -> list[tuple[str, str, str]]:
    """Return the keys whose requests succeeded, from the ledger; an empty list before it has a table."""
    with closing(sqlite3.connect(folder / "usage.db")) as database:
        if database.execute("select 1 from sqlite_master where name = 'gateway_usage'").fetchone() is None:
            return []
        return database.execute("select key, team, labels from gateway_usage where status = 200 group by key order by key").fetchall()


def rotated(one: Gateway, issuer: Issuer) -> None:
    """Check that a new key is known within seconds of its first token."""
    fresh = SigningKey("EdDSA", "second")
    issuer.published.append(fresh.jwk())
    token = issuer.token(fresh, sub="carol")
    response = send_chat(one, token)
    assert response.status_code == 200 or "has not published" in response.text
    wait_for(lambda: send_chat(one, token).status_code == 200)


def usable_without_issuer(one: Gateway, shown: Published) -> None:
    """Check that metrics and status report an unreachable issuer, and that its tokens stay valid."""
    shown.status = 503
    unknown = shown.issuer.token(SigningKey("ES256", "third"))
    wait_for(
        lambda: send_chat(one, unknown).status_code == 401 and one.metric(f'vllm_gateway_key_set_up{{issuer="{shown.issuer.name}"}}') == 0
    )
    (row,) = one.get("/status").json()["issuers"]
    assert (row["issuer"], row["keys"], row["problem"]) == (shown.issuer.name, shown.url, "it responded with status 503")
    assert send_chat(one, shown.issuer.token(sub="bob")).status_code == 200


def test_keys_in_a_file_and_an_issuer_that_was_never_reachable(tmp_path: Path) -> None:
    issuer, unreachable = Issuer("https://a.example.com/"), Issuer("https://b.example.com/")
    with published(unreachable) as shown:
        shown.status = 0
        (tmp_path / "keys.json").write_bytes(issuer.document)
        config = with_tokens(provider("keys.json") | {"issuer": issuer.name}, provider(shown, keys="team-a"))
        with gateway(tmp_path, config) as one:
            assert send_chat(one, issuer.token()).status_code == 200
            refused = send_chat(one, unreachable.token())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            fresh = Issuer(issuer.name, SigningKey("RS256"))
            (tmp_path / "keys.json").write_bytes(fresh.document)
            wait_for(lambda: send_chat(one, fresh.token(sub="bob")).status_code == 200)
            assert send_chat(one, issuer.token()).status_code == 401
            shown.status = 200
            wait_for(lambda: send_chat(one, unreachable.token(sub="carol")).status_code == 200, 60)
