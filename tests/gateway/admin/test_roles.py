"""Roles on the admin port: each token may use exactly the routes of its role, and TLS protects the tokens."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.actor import Role
from gateway.access.permissions import PERMISSIONS
from gateway.admin.openapi import ROUTES
from gateway.auth.keys import hash_of
from tests.support.certificates import certificate
from tests.support.console import responded
from tests.support.process import PROGRAM, Gateway, configuration, gateway, launched, wait_for, write

ROLES = ("viewer", "operator", "admin")
LEGACY = "today's-token"
PATHS = {
    "/metrics/servers/{server:path}": "/metrics/servers/sim%2Fone%230",
    "/models/{id:path}/{operation}": "/models/sim%2Fone/wake",
    "/servers/{server:path}/{server_operation}": "/servers/sim%2Fone%230/uncordon",
}


def tokens(**more: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": role, "hash": hash_of(f"token-of-{role}"), "role": role, **more.get(role, {})} for role in ROLES]


def call(one: Gateway, token: str | None, method: str, path: str, **more: Any) -> httpx2.Response:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return responded(method, f"http://127.0.0.1:{one.admin}{path}", headers=headers | more)


def config(folder: Path) -> dict[str, Any]:
    (folder / "token").write_text(LEGACY)
    return configuration(launched(), admin={"port": 0, "token": {"file": "token"}, "tokens": tokens()})


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("roles")
    (folder / "token").write_text(LEGACY)
    own = config(folder)
    with gateway(folder, own, ready=False) as running:
        wait_for(lambda: call(running, None, "GET", "/readyz").status_code == 200, why=lambda: running.output)
        yield running


def test_each_route_has_a_permission_and_each_permission_a_route() -> None:
    assert {(route.method, route.path) for route in ROUTES} == set(PERMISSIONS)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_use_its_routes_and_no_others(one: Gateway, role: str) -> None:
    for (method, path), permission in PERMISSIONS.items():
        if path == "/drain":
            continue
        response = call(one, f"token-of-{role}", method, PATHS.get(path, path))
        is_permitted = permission.role is None or list(Role).index(Role(role)) >= list(Role).index(permission.role)
        assert (response.status_code != 403) == is_permitted, (method, path, response.text)
        if not is_permitted:
            expected = f"this requires the role {permission.role}; the token {role} has the role {role}"
            assert (response.status_code, response.json()["error"]) == (403, expected)


def test_a_viewer_changes_nothing(one: Gateway) -> None:
    for path in ("/drain", "/models/sim%2Fone/stop", "/servers/sim%2Fone%230/cordon", "/models/none/stop"):
        assert call(one, "token-of-viewer", "POST", path).status_code == 403
    assert one.request().status_code == 200


def test_the_single_token_is_an_admin(one: Gateway) -> None:
    assert call(one, LEGACY, "POST", "/models/sim%2Fone/wake").status_code == 200
    assert "wake of sim/one requested by the token, from 127.0.0.1" in one.output
    call(one, "token-of-operator", "POST", "/models/sim%2Fone/wake")
    assert "wake of sim/one requested by the token operator, from 127.0.0.1" in one.output


def test_a_web_page_cannot_act_with_a_token(one: Gateway) -> None:
    for token in ("token-of-admin", "token-of-viewer", "wrong", None):
        assert call(one, token, "POST", "/reload", origin="https://evil.example.com").status_code == 403


def test_tokens_expire_and_change_without_a_restart(tmp_path: Path) -> None:
    own = configuration(launched(), admin={"port": 0, "tokens": tokens()})
    with gateway(tmp_path, own, ready=False) as running:
        wait_for(lambda: call(running, "token-of-viewer", "GET", "/readyz").status_code == 200)
        before = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
        own["server"]["admin"]["tokens"] = tokens(viewer={"expires": before}, operator={"hash": hash_of("new")})
        write(tmp_path / "gateway.yaml", own)
        wait_for(lambda: call(running, "new", "GET", "/status").status_code == 200)
        assert [call(running, token, "GET", "/status").status_code for token in ("token-of-viewer", "token-of-operator")] == [401, 401]
        own["server"]["admin"]["tokens"] = tokens()
        write(tmp_path / "gateway.yaml", own)
        wait_for(lambda: call(running, "token-of-viewer", "GET", "/status").status_code == 200)


def test_tls_on_the_admin_port(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, second = certificate(tmp_path / "first"), certificate(tmp_path / "second")
    for file, name in zip(first, ("cert.pem", "key.pem"), strict=True):
        shutil.copy(file, tmp_path / name)
    tls = {"cert": "cert.pem", "key": "key.pem"}
    (tmp_path / "token").write_text("token-of-viewer")
    own = configuration(launched(), admin={"port": 0, "tls": tls, "tokens": tokens()})
    with gateway(tmp_path, own, ready=False) as running:

        def status(cert: Path) -> int:
            context = ssl.create_default_context(cafile=str(cert))
            headers = {"authorization": "Bearer token-of-viewer"}
            return httpx2.get(f"https://localhost:{running.admin}/metrics", headers=headers, verify=context, timeout=30).status_code

        assert status(first[0]) == 200
        assert f"metrics   https://127.0.0.1:{running.admin}/metrics" in running.output
        with pytest.raises(httpx2.HTTPError):
            call(running, "token-of-viewer", "GET", "/metrics")
        there = ["status", "--admin", f"https://localhost:{running.admin}", "--token-file", str(tmp_path / "token")]
        for variables, code in (({}, 1), ({"SSL_CERT_FILE": str(first[0])}, 0)):
            assert subprocess.run([PROGRAM, *there], env=os.environ | variables, capture_output=True, cwd="/").returncode == code
        for file, name in zip(second, ("cert.pem", "key.pem"), strict=True):
            shutil.copy(file, tmp_path / f"{name}.new")
            (tmp_path / f"{name}.new").replace(tmp_path / name)

        def renewed() -> bool:
            try:
                return status(second[0]) == 200
            except httpx2.HTTPError:
                return False

        wait_for(renewed, why=lambda: running.output)
        with pytest.raises(httpx2.HTTPError):
            status(first[0])
        assert running.command("status").returncode == 0, "the socket needs neither"
