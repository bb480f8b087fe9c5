"""Signing in and out over HTTP with an honest issuer, and the attacks of hostile issuers, pages and people."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx2
import pytest

from gateway.access.actor import Actor, Role
from gateway.sign_in.browser import Port
from tests.gateway.sign_in.ports import Ports, entry, ports
from tests.support.issuer import SigningKey
from tests.support.oidc_issuer import OidcIssuer

ADMIN = Actor("token", "root", Role.ADMIN)
ALICE = {"name": "Alice", "role": "admin", "teams": ["lab"], "owned_teams": []}


async def test_a_person_signs_in_and_out(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    authorization = await gateway.start(browser, return_to="/keys?a=b")
    response = await browser.get(issuer.approve(authorization, groups=["lab", "llm-admins"], name="Alice", sid="s1"))
    assert (response.status_code, response.headers["location"]) == (303, "/keys?a=b")
    cookies = response.headers.get_list("set-cookie")
    assert len(cookies) == 2 and all("HttpOnly; SameSite=Lax" in each for each in cookies)
    assert response.headers["cache-control"] == "no-store"
    assert await gateway.person(browser) == ALICE
    assert await gateway.person(browser, "admin") is None, "each port has its own session"
    page = await gateway.post(browser, "/sign-out")
    assert page.status_code == 200 and await gateway.person(browser) is None
    onward = urlsplit(re.search(r'class="way" href="([^"]+)"', page.text).group(1).replace("&amp;", "&"))  # type: ignore[union-attr]
    query = dict(parse_qsl(onward.query))
    assert f"{onward.scheme}://{onward.netloc}{onward.path}" == f"{issuer.url}/logout"
    assert query["client_id"] == "vllm-gateway" and query["id_token_hint"].count(".") == 2
    assert query["post_logout_redirect_uri"] == f"{gateway.origins['data']}/sign-in"
    assert gateway.actions() == ["person.sign_in", "person.sign_out"]
    assert gateway.entries[0].actor == Actor("person", "one:alice", Role.ADMIN)


async def test_the_page_lists_the_issuers_and_nothing_else_runs_on_it(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    page = await browser.get(f"{gateway.origins['data']}/sign-in", params={"return_to": "/a?b=c&d"})
    assert "Continue with The &lt;b&gt;first&lt;/b&gt;" in page.text and "Continue with two" in page.text
    assert "/sign-in?issuer=one&amp;return_to=%2Fa%3Fb%3Dc%26d" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy and "frame-ancestors 'none'" in policy


async def test_with_one_issuer_there_is_no_choice(tmp_path: Path, issuer: OidcIssuer) -> None:
    async with ports(tmp_path, entry(issuer)) as running, running.browser() as browser:
        response = await browser.get(f"{running.origins['data']}/sign-in")
        assert response.headers["location"].startswith(f"{issuer.url}/authorize?tenant=1&response_type=code&")


async def test_another_name_of_the_gateway_leads_to_its_address(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    origin = gateway.origins["data"]
    response = await browser.get(f"{origin}/sign-in", headers={"host": "evil.example.com"})
    assert (response.status_code, response.headers["location"]) == (303, f"{origin}/sign-in")
    for path in ("/sign-in/session", "/sign-out", "/sign-in/callback/one?code=c", "/sign-in/link?token=t"):
        assert (await browser.get(origin + path, headers={"host": "evil.example.com"})).status_code == 421


@pytest.mark.parametrize("key", [SigningKey("RS256", "new"), SigningKey("EdDSA", "new")], ids=["RS256", "EdDSA"])
async def test_a_new_key_of_the_issuer_is_fetched(gateway: Ports, issuer: OidcIssuer, key: SigningKey) -> None:
    async with gateway.browser() as browser:
        assert (await gateway.sign_in(browser, issuer)).status_code == 303
        provider = gateway.service._provider("one")
        provider._keys.requested -= 60  # the time in which the same keys are not fetched again has passed
        issuer.keys.insert(0, key)
        issuer.published.append(key.jwk())
        assert (await gateway.sign_in(browser, issuer)).status_code == 303
    assert issuer.requests.count("/keys") == 2


# Attacks on the response of the issuer


async def no_cookie(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Inject the response of the attacker's own sign-in into the browser of a victim."""
    async with gateway.browser() as attacker:
        return issuer.approve(await gateway.start(attacker), groups=["lab"])


async def cookie_of_another_attempt(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Inject it while the victim is signing in."""
    callback = await no_cookie(gateway, browser, issuer, other)
    await gateway.start(browser)
    return callback


async def code_of_another_attempt(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Inject a stolen code into the attacker's own sign-in: PKCE binds it to the victim's."""
    async with gateway.browser() as victim:
        stolen = issuer.approve(await gateway.start(victim), groups=["llm-admins"])
    code = dict(parse_qsl(urlsplit(stolen).query))["code"]
    own = issuer.approve(await gateway.start(browser), groups=["lab"])
    query = dict(parse_qsl(urlsplit(own).query)) | {"code": code}
    return own.partition("?")[0] + "?" + urlencode(query)


async def replayed_response(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Replay a response with its cookie, and with a code that was not used."""
    authorization = await gateway.start(browser)
    cookies = dict(browser.cookies)
    callback = issuer.approve(authorization, groups=["lab"])
    assert (await browser.get(callback)).status_code == 303
    assert (await gateway.post(browser, "/sign-out")).status_code == 200
    browser.cookies.update(cookies)
    return issuer.approve(authorization, groups=["lab"])


async def mixed_up_issuers(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Send the browser that chose the hostile issuer on to the honest one, whose code the hostile one would get."""
    authorization = await gateway.start(browser, issuer="two")
    return issuer.approve(authorization, groups=["llm-admins"])


async def mixed_up_without_the_parameter(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """The same with an honest issuer without RFC 9207: it knows only its own redirect URI."""
    issuer.sends_issuer = issuer.announces_issuer = False
    other.announces_issuer = False
    authorization = await gateway.start(browser, issuer="two")
    callback = issuer.approve(authorization, groups=["llm-admins"])
    assert "/sign-in/callback/two?" in callback, "the honest issuer has registered only /sign-in/callback/one, and refuses it"
    return callback.replace("/callback/two?", "/callback/one?")


async def without_the_announced_issuer(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    issuer.sends_issuer = False
    return issuer.approve(await gateway.start(browser), groups=["lab"])


async def the_other_port(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Use a response for the data port on the admin port, under the name of its cookie."""
    callback = issuer.approve(await gateway.start(browser), groups=["llm-admins"])
    browser.cookies.set("vllm-gateway-admin-sign-in", browser.cookies["vllm-gateway-sign-in"])
    return callback.replace(gateway.origins["data"], gateway.origins["admin"])


async def a_session_as_an_attempt(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Send a session as the cookie of an attempt: both are signed with keys of one secret."""
    await gateway.sign_in(browser, issuer)
    callback = issuer.approve(await gateway.start(browser), groups=["lab"])
    browser.cookies.set("vllm-gateway-sign-in", browser.cookies["vllm-gateway-session"])
    return callback


async def a_cookie_twice(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    """Add a second cookie of an attempt, as a page of a neighboring host can."""
    callback = issuer.approve(await gateway.start(browser), groups=["lab"])
    browser.headers["cookie"] = "vllm-gateway-sign-in=x; vllm-gateway-sign-in=" + browser.cookies["vllm-gateway-sign-in"]
    return callback


async def an_unknown_issuer(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    return issuer.approve(await gateway.start(browser), groups=["lab"]).replace("/callback/one?", "/callback/three?")


async def a_code_twice(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    return issuer.approve(await gateway.start(browser), groups=["lab"]) + "&code=other"


async def too_many_parameters(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    return issuer.approve(await gateway.start(browser), groups=["lab"]) + "&a=b" * 100


async def an_error(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer) -> str:
    return issuer.approve(await gateway.start(browser), groups=["lab"]) + "&error=access_denied&error_description=<script>"


Attack = Callable[[Ports, httpx2.AsyncClient, OidcIssuer, OidcIssuer], Awaitable[str]]
RESPONSES: list[Attack] = [
    no_cookie, cookie_of_another_attempt, code_of_another_attempt, replayed_response, mixed_up_issuers, mixed_up_without_the_parameter,
    without_the_announced_issuer, the_other_port, a_session_as_an_attempt, a_cookie_twice, an_unknown_issuer, a_code_twice,
    too_many_parameters, an_error,
]  # fmt: skip


@pytest.mark.parametrize("attack", RESPONSES, ids=lambda attack: attack.__name__)
async def test_a_response_that_was_not_requested_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer, attack: Attack
) -> None:
    callback = await attack(gateway, browser, issuer, other)
    before, exchanged = len(gateway.entries), len(other.exchanges)
    response = await browser.get(callback)
    assert response.status_code in (400, 403, 404), response.text
    assert not any("session=" in each and "Max-Age=0" not in each for each in response.headers.get_list("set-cookie"))
    assert "<script>" not in response.text
    assert len(other.exchanges) == exchanged, "the hostile issuer gets no code"
    recorded = [] if attack is too_many_parameters else ["person.sign_in.refused"]
    assert [each.action for each in gateway.entries[before:]] == recorded


# Attacks in the ID token of the issuer


def with_claims(**claims: Any) -> Callable[[OidcIssuer], dict[str, Any]]:
    return lambda _: {"groups": ["llm-admins"], **claims}


TOKENS: dict[str, Callable[[OidcIssuer], dict[str, Any]]] = {
    "another nonce": with_claims(nonce="other"),
    "no nonce": with_claims(nonce=None),
    "expired": with_claims(exp=1),
    "issued in the future": with_claims(iat=2**33),
    "another audience": with_claims(aud="other"),
    "another issuer": with_claims(iss="https://evil.example.com"),
    "no subject": with_claims(sub=None),
    "no role and no team": with_claims(groups=["unknown"]),
    "groups as a text": with_claims(groups="llm-admins lab"),
}


@pytest.mark.parametrize("attack", TOKENS)
async def test_a_token_that_is_not_for_this_sign_in_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, attack: str
) -> None:
    response = await gateway.sign_in(browser, issuer, **TOKENS[attack](issuer))
    assert response.status_code in (400, 403, 502) and await gateway.person(browser) is None
    assert gateway.actions() == ["person.sign_in.refused"]


async def test_the_token_of_another_sign_in_is_refused(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    tokens: list[str] = []

    def sign(claims: dict[str, Any]) -> str:
        tokens.append(issuer.signed(claims))
        return tokens[0]

    issuer.sign = sign
    async with gateway.browser() as victim:
        assert (await gateway.sign_in(victim, issuer)).status_code == 303
    assert (await gateway.sign_in(browser, issuer)).status_code == 502 and len(tokens) == 2


async def test_one_issuer_cannot_sign_in_the_people_of_another(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer
) -> None:
    """A hostile issuer with the name, the subject and the groups of the first one."""
    other.metadata = {"issuer": issuer.url}
    refused = await browser.get(f"{gateway.origins['data']}/sign-in", params={"issuer": "two"})
    assert refused.status_code == 502 and "unusable response" in refused.text
    other.metadata = {}
    other.sign = lambda claims: other.signed({**claims, "iss": issuer.url})
    assert (await gateway.sign_in(browser, other, provider="two")).status_code == 502
    other.sign = None
    assert (await gateway.sign_in(browser, other, provider="two")).status_code == 303
    assert await gateway.person(browser) == {**ALICE, "role": None}
    assert gateway.entries[-1].actor.name == "two:alice"


async def test_without_a_provider_there_is_no_session(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    issuer.down = True
    response = await browser.get(f"{gateway.origins['data']}/sign-in", params={"issuer": "one"})
    assert response.status_code == 502 and "does not respond" in response.text
    issuer.down = False
    authorization = await gateway.start(browser)
    issuer.token_status = 500
    assert (await browser.get(issuer.approve(authorization, groups=["lab"]))).status_code == 502
    assert await gateway.person(browser) is None


@pytest.mark.parametrize("path", ["//evil.example.com", "/\\evil.example.com", "https://evil.example.com", "/\t/evil.example.com"])
async def test_a_sign_in_leads_to_no_other_origin(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, path: str) -> None:
    authorization = await gateway.start(browser, return_to=path)
    response = await browser.get(issuer.approve(authorization, groups=["lab"]))
    assert response.headers["location"] == "/"


# Sessions


async def test_a_new_sign_in_gets_a_new_session_and_ends_the_old_one(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer
) -> None:
    """A session that an attacker has planted is not that of the victim afterwards (session fixation)."""
    async with gateway.browser() as attacker:
        await gateway.sign_in(attacker, issuer, sub="mallory", groups=["lab"])
        planted = attacker.cookies["vllm-gateway-session"]
        browser.cookies.set("vllm-gateway-session", planted, domain="127.0.0.1", path="/")
        await gateway.sign_in(browser, issuer)
        assert browser.cookies["vllm-gateway-session"] != planted
        assert await gateway.person(browser) == ALICE
        assert await gateway.person(attacker) is None


async def test_an_arbitrary_cookie_is_no_session(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    browser.cookies.set("vllm-gateway-session", "x" * 22, domain="127.0.0.1", path="/")
    assert await gateway.person(browser) is None


async def test_a_session_of_the_data_port_is_none_of_the_admin_port(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer
) -> None:
    await gateway.sign_in(browser, issuer)
    browser.cookies.set("vllm-gateway-admin-session", browser.cookies["vllm-gateway-session"], domain="127.0.0.1", path="/")
    assert await gateway.person(browser, "admin") is None


@pytest.mark.parametrize("port", ["data", "admin"])
async def test_a_sign_out_holds_on_both_ports(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, port: Port) -> None:
    await gateway.sign_in(browser, issuer, "data", sid="s1")
    await gateway.sign_in(browser, issuer, "admin", sid="s1")
    stolen = dict(browser.cookies)
    await gateway.post(browser, "/sign-out", port)
    async with gateway.browser() as thief:
        thief.cookies.update(stolen)
        assert await gateway.person(thief, "data") is None and await gateway.person(thief, "admin") is None


async def test_a_sign_out_ends_the_providers_session_in_other_browsers_only_if_it_is_the_same(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer
) -> None:
    async with gateway.browser() as same, gateway.browser() as phone:
        for each, sid in ((browser, "s1"), (same, "s1"), (phone, "s2")):
            await gateway.sign_in(each, issuer, sid=sid)
        await gateway.post(browser, "/sign-out")
        assert await gateway.person(same) is None and await gateway.person(phone) == ALICE


# Logout by the issuer


async def logout(gateway: Ports, token: str, port: Port = "data") -> httpx2.Response:
    async with gateway.browser() as provider:
        return await provider.post(f"{gateway.origins[port]}/back-channel-logout", data={"logout_token": token})


@pytest.mark.parametrize("names", [{"sid": "s1"}, {"sub": "alice"}, {"sid": "s1", "sub": "alice"}], ids=str)
@pytest.mark.parametrize("port", ["data", "admin"])
async def test_an_issuer_signs_a_person_out_on_both_ports(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, names: dict[str, str], port: Port
) -> None:
    await gateway.sign_in(browser, issuer, "data", sid="s1")
    await gateway.sign_in(browser, issuer, "admin", sid="s1")
    response = await logout(gateway, issuer.logout_token(**names), port)
    assert (response.status_code, response.content, response.headers["cache-control"]) == (200, b"", "no-store")
    assert await gateway.person(browser, "data") is None and await gateway.person(browser, "admin") is None
    assert gateway.actions()[-1] == "person.logout" and gateway.entries[-1].before == {"sessions": 2}


@pytest.mark.parametrize("names", [{"sid": "s2"}, {"sub": "bob"}, {"sid": "s1", "sub": "bob"}], ids=str)
async def test_an_issuer_signs_no_other_person_out(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, names: dict[str, str]
) -> None:
    await gateway.sign_in(browser, issuer, sid="s1")
    assert (await logout(gateway, issuer.logout_token(**names))).status_code == 200
    assert await gateway.person(browser) == ALICE


async def test_one_issuer_cannot_sign_out_the_people_of_another(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, other: OidcIssuer
) -> None:
    await gateway.sign_in(browser, issuer, sid="s1")
    assert (await logout(gateway, other.logout_token(sid="s1", sub="alice"))).status_code == 200
    assert (await logout(gateway, other.logout_token(iss=issuer.url, sid="s1"))).status_code == 400
    assert await gateway.person(browser) == ALICE


async def test_a_repeated_logout_token_does_not_end_later_sessions(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    await gateway.sign_in(browser, issuer)
    token = issuer.logout_token(sub="alice")
    await logout(gateway, token)
    await gateway.sign_in(browser, issuer)
    assert (await logout(gateway, token)).status_code == 200
    assert await gateway.person(browser) == ALICE


async def test_a_sign_in_whose_session_has_ended_meanwhile_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer
) -> None:
    authorization = await gateway.start(browser)
    await logout(gateway, issuer.logout_token(sid="s1"))
    response = await browser.get(issuer.approve(authorization, groups=["lab"], sid="s1"))
    assert response.status_code == 400 and "signed out meanwhile" in response.text


LOGOUTS: dict[str, Callable[[OidcIssuer], str]] = {
    "nothing": lambda _: "",
    "text": lambda _: "a.b.c",
    "an unknown issuer": lambda issuer: issuer.logout_token(iss="https://evil.example.com", sub="alice"),
    "an ID token": lambda issuer: issuer.signed({"iss": issuer.url, "aud": "vllm-gateway", "sub": "alice", "iat": 1, "exp": 2**33}),
    "with a nonce": lambda issuer: issuer.logout_token(sub="alice", nonce="n"),
    "expired": lambda issuer: issuer.logout_token(sub="alice", exp=1),
    "another audience": lambda issuer: issuer.logout_token(sub="alice", aud="other"),
    "nobody": lambda issuer: issuer.logout_token(),
}


@pytest.mark.parametrize("attack", LOGOUTS)
async def test_a_forged_logout_token_is_refused(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, attack: str) -> None:
    await gateway.sign_in(browser, issuer)
    response = await logout(gateway, LOGOUTS[attack](issuer))
    assert (response.status_code, response.json()["error"]) == (400, "invalid_request")
    assert await gateway.person(browser) == ALICE


# Sign-in links


async def link(gateway: Ports, subject: str = "bob", role: Role | None = Role.VIEWER) -> str:
    return (await gateway.service.create_link(ADMIN, "127.0.0.1", subject, role, ("lab",), ()))[0]


def token_of(url: str) -> str:
    return dict(parse_qsl(urlsplit(url).query))["token"]


async def test_a_sign_in_link_signs_a_person_in_once(gateway: Ports, browser: httpx2.AsyncClient) -> None:
    urls = await gateway.service.create_link(ADMIN, "127.0.0.1", "bob", Role.VIEWER, ("lab",), ())
    assert [urlsplit(url).netloc for url in urls] == [urlsplit(origin).netloc for origin in gateway.origins.values()]
    for _ in range(3):  # a program that previews links looks at it, too
        page = await browser.get(urls[0])
        assert page.status_code == 200 and "Sign in as bob" in page.text and page.headers["referrer-policy"] == "same-origin"
    used = await gateway.post(browser, "/sign-in/link", token=token_of(urls[0]))
    assert (used.status_code, used.headers["location"]) == (303, "/")
    assert await gateway.person(browser) == {"name": "bob", "role": "viewer", "teams": ["lab"], "owned_teams": []}
    for url in urls:
        async with gateway.browser() as thief:
            assert (await thief.get(url)).status_code == 403
            assert (await gateway.post(thief, "/sign-in/link", token=token_of(url))).status_code == 403
            assert await gateway.person(thief) is None
    assert gateway.actions() == ["sign_in_link.create", "person.sign_in", "person.sign_in.refused", "person.sign_in.refused"]
    assert token_of(urls[0]) not in str(gateway.entries)


async def test_of_many_uses_at_once_one_succeeds(gateway: Ports) -> None:
    token = token_of(await link(gateway))
    async with gateway.browser() as browser:
        responses = await asyncio.gather(*(gateway.post(browser, "/sign-in/link", token=token) for _ in range(8)))
    assert sorted(each.status_code for each in responses) == [303, *[403] * 7]


async def test_a_link_names_no_person_of_an_issuer(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    await gateway.sign_in(browser, issuer)
    async with gateway.browser() as linked:
        await gateway.post(linked, "/sign-in/link", token=token_of(await link(gateway, "alice", None)))
        await logout(gateway, issuer.logout_token(sub="alice"))
        assert await gateway.person(browser) is None
        assert await gateway.person(linked) == {"name": "alice", "role": None, "teams": ["lab"], "owned_teams": []}


@pytest.mark.parametrize("token", ["", "x", "a" * 5000, "%00"])
async def test_a_guessed_link_is_refused(gateway: Ports, browser: httpx2.AsyncClient, token: str) -> None:
    assert (await browser.get(f"{gateway.origins['data']}/sign-in/link", params={"token": token})).status_code == 403
    assert (await gateway.post(browser, "/sign-in/link", token=token)).status_code == 403


# Requests of other pages


FOREIGN: dict[str, dict[str, str]] = {
    "no header": {},
    "another origin": {"origin": "https://evil.example.com"},
    "an opaque origin": {"origin": "null"},
    "another site": {"sec-fetch-site": "cross-site"},
    "the same site": {"sec-fetch-site": "same-site"},
    "a referrer alone": {"referer": "HERE/sign-out"},
    "contradicting headers": {"origin": "HERE", "sec-fetch-site": "cross-site"},
}


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("port", ["data", "admin"])
async def test_another_page_can_sign_no_person_in_or_out(gateway: Ports, issuer: OidcIssuer, headers: str, port: Port) -> None:
    origin = gateway.origins[port]
    sent = {name: value.replace("HERE", origin) for name, value in FOREIGN[headers].items()}
    token = token_of(await link(gateway))
    async with gateway.browser() as victim:
        assert (await gateway.sign_in(victim, issuer, port)).status_code == 303
        for path, form in (("/sign-out", {}), ("/sign-in/link", {"token": token})):
            refused = await victim.post(f"{origin}{path}", data=form, headers=sent)
            assert refused.status_code == 403 and "another page" in refused.text
        assert await gateway.person(victim, port) == ALICE
    assert (await gateway.service.link(token)).subject == "bob", "the link was not used"


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_change_nothing(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, method: str) -> None:
    authorization = await gateway.start(browser)
    callback = issuer.approve(authorization, groups=["llm-admins", "lab"], name="Alice")
    assert (await browser.request(method, callback)).status_code == 405
    assert (await browser.request(method, f"{gateway.origins['data']}/sign-out")).status_code == 405
    assert (await browser.get(callback)).status_code == 303
    assert await gateway.person(browser) == ALICE


@pytest.mark.parametrize("path", ["/sign-out", "/sign-in/link"])
async def test_a_look_at_a_page_changes_nothing(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer, path: str) -> None:
    await gateway.sign_in(browser, issuer)
    await browser.get(gateway.origins["data"] + path)
    assert await gateway.person(browser) == ALICE


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"token=a", "application/json", 415),
        (b"token=a", "text/plain", 415),
        (b"token=" + b"a" * 40_000, "application/x-www-form-urlencoded", 413),
        (b"token=\xff", "application/x-www-form-urlencoded", 400),
        (b"a&" * 100, "application/x-www-form-urlencoded", 400),
    ],
)
async def test_a_body_that_is_no_small_form_is_refused(
    gateway: Ports, browser: httpx2.AsyncClient, content: bytes, kind: str, status: int
) -> None:
    origin = gateway.origins["data"]
    response = await browser.post(f"{origin}/sign-in/link", content=content, headers={"origin": origin, "content-type": kind})
    assert response.status_code == status


async def test_names_with_markup_are_shown_as_text(gateway: Ports, browser: httpx2.AsyncClient, issuer: OidcIssuer) -> None:
    await gateway.sign_in(browser, issuer, name="<script>alert(1)</script>\x00\u202e")
    page = await browser.get(f"{gateway.origins['data']}/sign-out")
    assert "&lt;script&gt;" in page.text and "<script>" not in page.text and "\x00" not in page.text
