"""Signing in and out at an issuer that this project has not written: npm's oidc-provider, which `make clients` installs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urljoin, urlsplit

import httpx2
import pytest

from tests.clients.install import NODE, installed
from tests.gateway.sign_in.ports import Ports, entry, ports, settings_of
from tests.support.oidc_issuer import CLIENT, SECRET, OidcIssuer

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not installed(NODE / "node_modules", NODE / "package-lock.json"),
    reason="needs `make clients`",
)


@asynccontextmanager
async def provider(gateway: Ports) -> AsyncIterator[OidcIssuer]:
    """Run the provider with this gateway as its client. Returns an issuer that only has its URL."""
    origin = gateway.origins["data"]
    settings = {
        "client_id": CLIENT, "client_secret": SECRET, "redirect_uris": [f"{origin}/sign-in/callback/one"],
        "post_logout_redirect_uris": [f"{origin}/sign-in"], "backchannel_logout_uri": f"{origin}/back-channel-logout",
    }  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", str(NODE / "serve_oidc.mjs"), json.dumps(settings), stdout=pipe, stderr=None)
    try:
        assert process.stdout is not None
        yield OidcIssuer(url=f"http://127.0.0.1:{int(await process.stdout.readline())}")
    finally:
        process.terminate()
        await process.communicate()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Ports]:
    """Ports whose issuer is set as soon as it runs."""
    async with ports(tmp_path, entry(OidcIssuer(url="http://127.0.0.1:1"))) as running, provider(running) as issuer:
        running.settings = settings_of(entry(issuer), url=running.origins["data"], admin_url=running.origins["admin"])
        yield running


async def followed(browser: httpx2.AsyncClient, response: httpx2.Response, until: str) -> httpx2.Response:
    """Follow redirects to a page, or to the request that starts with ``until``, which is sent last."""
    while response.is_redirect and not str(response.url).startswith(until):
        response = await browser.get(urljoin(str(response.url), response.headers["location"]))
    return response


async def signed_in(gateway: Ports, browser: httpx2.AsyncClient) -> httpx2.Response:
    """Sign in with the forms of the provider, and consent. Returns the response at the redirect URI."""
    callback = f"{gateway.origins['data']}/sign-in/callback/one"
    page = await followed(browser, await browser.get(await gateway.start(browser, return_to="/keys")), callback)
    for form in ({"prompt": "login", "login": "alice", "password": "any"}, {"prompt": "consent"}):
        if str(page.url).startswith(callback):
            break
        page = await followed(browser, await browser.post(str(page.url), data=form), callback)
    return page


async def test_a_person_signs_in_and_out(gateway: Ports) -> None:
    async with gateway.browser() as browser:
        response = await signed_in(gateway, browser)
        assert (response.status_code, response.headers["location"]) == (303, "/keys"), response.text
        assert "iss=" in str(response.url), "the provider sends its issuer (RFC 9207)"
        assert await gateway.person(browser) == {"name": "Alice", "role": "admin", "teams": ["lab"], "owned_teams": []}
        stolen = browser.cookies["vllm-gateway-session"]
        page = await gateway.post(browser, "/sign-out")
        onward = re.search(r'class="way" href="([^"]+)"', page.text)
        assert onward is not None
        confirm = await browser.get(onward[1].replace("&amp;", "&"))
        assert confirm.status_code == 200, confirm.text
        xsrf = re.search(r'name="xsrf" value="([^"]+)"', confirm.text)
        assert xsrf is not None
        ended = await browser.post(urljoin(str(confirm.url), "/session/end/confirm"), data={"xsrf": xsrf[1], "logout": "yes"})
        assert ended.headers["location"] == f"{gateway.origins['data']}/sign-in"
    async with gateway.browser() as thief:
        thief.cookies.set("vllm-gateway-session", stolen, domain="127.0.0.1", path="/")
        assert await gateway.person(thief) is None


async def test_the_end_of_the_providers_session_signs_a_person_out(gateway: Ports) -> None:
    """The provider sends a logout token when the person signs out there."""
    async with gateway.browser() as browser:
        await signed_in(gateway, browser)
        issuer = gateway.settings.issuers[0].issuer
        confirm = await browser.get(f"{issuer}/session/end")
        xsrf = re.search(r'name="xsrf" value="([^"]+)"', confirm.text)
        assert xsrf is not None
        await browser.post(f"{issuer}/session/end/confirm", data={"xsrf": xsrf[1], "logout": "yes"})
        assert await gateway.person(browser) is None
        assert gateway.actions() == ["person.sign_in", "person.logout"]


async def test_a_code_of_the_provider_works_once(gateway: Ports) -> None:
    async with gateway.browser() as browser:
        response = await signed_in(gateway, browser)
        assert response.status_code == 303
        assert (await browser.get(str(response.url))).status_code == 400
        query = dict(parse_qsl(urlsplit(str(response.url)).query))
        again = await gateway.start(browser)
        state = dict(parse_qsl(urlsplit(again).query))["state"]
        replayed = await browser.get(f"{gateway.origins['data']}/sign-in/callback/one", params={**query, "state": state})
        assert replayed.status_code == 400 and "has expired or was used before" in replayed.text
