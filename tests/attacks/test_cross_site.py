"""Another page acts with a person's session. The routes come from the applications, so a new one is covered."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from starlette.routing import Route

from gateway.sign_in.browser import Port
from gateway.sign_in.paths import BACK_CHANNEL
from gateway.sign_in.routes import application
from tests.gateway.sign_in.ports import Ports
from tests.gateway.sign_in.test_routes import ALICE, FOREIGN, link, token_of
from tests.support.oidc_issuer import OidcIssuer

READING = {"GET", "HEAD"}
PATHS = {"/sign-in/callback/{issuer}": "/sign-in/callback/one"}


def routes(gateway: Ports, port: Port) -> Iterator[tuple[str, str]]:
    """Yield the method and path of each route that a cookie authorizes. The back-channel logout needs a signed token instead."""
    for route in application(gateway.service, port).routes:
        assert isinstance(route, Route) and route.methods is not None
        if route.path != BACK_CHANNEL:
            yield from ((method, PATHS.get(route.path, route.path)) for method in sorted(route.methods))


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("port", ["data", "admin"])
async def test_another_page_changes_nothing(gateway: Ports, issuer: OidcIssuer, headers: str, port: Port) -> None:
    """Every method that may change something, on every route, also as a form of a preview and as JSON."""
    origin = gateway.origins[port]
    sent = {name: value.replace("HERE", origin) for name, value in FOREIGN[headers].items()}
    token = token_of(await link(gateway))
    async with gateway.browser() as victim:
        assert (await gateway.sign_in(victim, issuer, port)).status_code == 303
        tried = [route for route in routes(gateway, port) if route[0] not in READING]
        assert tried
        for method, path in tried:
            for body in ({"data": {"token": token}}, {"json": {"token": token}}, {"content": f"token={token}"}):
                response = await victim.request(method, origin + path, headers=sent, **body)
                assert response.status_code == 403 and "set-cookie" not in response.headers, (method, path, response.text)
        assert await gateway.person(victim, port) == ALICE
    assert (await gateway.service.link(token)).subject == "bob", "the link was not used"
    assert gateway.actions() == ["sign_in_link.create", "person.sign_in"]


@pytest.mark.parametrize("port", ["data", "admin"])
async def test_a_page_that_is_loaded_changes_nothing(gateway: Ports, issuer: OidcIssuer, port: Port) -> None:
    """An image or a frame of another site sends GET requests with the cookie, and a query that the attacker chooses."""
    token = token_of(await link(gateway))
    query = {"token": token, "return_to": "//evil.example.com", "code": "c", "state": "s"}
    async with gateway.browser() as victim:
        assert (await gateway.sign_in(victim, issuer, port)).status_code == 303
        session = {name: value for name, value in victim.cookies.items() if "session" in name}
        for method, path in routes(gateway, port):
            if method in READING:
                url, headers = gateway.origins[port] + path, {"sec-fetch-site": "cross-site", "referer": "https://evil.example.com/"}
                response = await victim.request(method, url, params=query, headers=headers)
                assert "access-control-allow-origin" not in response.headers, "the attacker's page reads nothing"
        assert {name: value for name, value in victim.cookies.items() if "session" in name} == session
        assert await gateway.person(victim, port) == ALICE
    assert (await gateway.service.link(token)).subject == "bob", "the link was not used"


async def test_a_page_of_the_other_port_changes_nothing(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    """Browsers call both ports the same site, and send the cookies of one to the other."""
    assert (await gateway.sign_in(browser, issuer, "admin")).status_code == 303
    headers = {"origin": gateway.origins["data"], "sec-fetch-site": "same-site"}
    assert (await browser.post(f"{gateway.origins['admin']}/sign-out", headers=headers)).status_code == 403
    assert await gateway.person(browser, "admin") == ALICE


@pytest.mark.parametrize("port", ["data", "admin"])
async def test_no_page_can_be_framed(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, port: Port) -> None:
    """A frame under another page would let a person press its button unknowingly (clickjacking)."""
    assert (await gateway.sign_in(browser, issuer, port)).status_code == 303
    for method, path in routes(gateway, port):
        if method == "GET":
            response = await browser.get(gateway.origins[port] + path, params={"token": token_of(await link(gateway))})
            if response.headers.get("content-type", "").startswith("text/html"):
                assert "frame-ancestors 'none'" in response.headers["content-security-policy"], path


async def test_a_name_of_another_host_reaches_no_route(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    """The attacker's name resolves to this gateway (DNS rebinding), so that the browser lets the attacker's page read responses."""
    assert (await gateway.sign_in(browser, issuer)).status_code == 303
    here = gateway.origins["data"]
    headers = {"host": "evil.example.com", "origin": "http://evil.example.com", "sec-fetch-site": "same-origin"}
    for method, path in routes(gateway, "data"):
        response = await browser.request(method, here + path, headers=headers)
        leads_home = (response.status_code, response.headers.get("location")) == (303, f"{here}/sign-in")
        assert response.status_code == 421 or (leads_home and path == "/sign-in"), (method, path, response.status_code)
    assert gateway.actions() == ["person.sign_in"]
