"""Cookies, origins and paths to return to, as hostile pages and browsers send them."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.sign_in.browser import (
    Port,
    attempt_cookie,
    cookie,
    delete_cookie,
    is_for,
    is_from_this_origin,
    local_path,
    session_cookie,
    set_cookie,
)

HERE = "https://llm.example.com"
WHATWG = str.maketrans("", "", "\t\r\n")


ELSEWHERE: dict[str, tuple[str, ...]] = {
    "slashes": ("//evil.example.com", "///evil.example.com", "////evil.example.com/%2e%2e"),
    "backslashes": ("/\\evil.example.com", "\\\\evil.example.com", "\\/evil.example.com", "/a\\b", "/\\/evil.example.com"),
    "a scheme": (
        "https://evil.example.com/",
        "https:evil.example.com",
        "https:/evil.example.com",
        "javascript:alert(1)",
        "data:text/html,x",
    ),
    "user information": ("//user@evil.example.com", "https://llm.example.com@evil.example.com", "@evil.example.com"),
    "control characters": ("/\t/evil.example.com", "/\n/evil.example.com", "\x01//evil.example.com", "/\0", "/\x7f", "/%0a\n"),
    "a header": ("/\r\nset-cookie: a=b", "/\r\nlocation: https://evil.example.com"),
    "encoded slashes": ("%2f%2fevil.example.com", "%5cevil.example.com", "%09//evil.example.com"),
    "spaces": (" //evil.example.com", "/ a", "\u00a0/", "/\u2003"),
    "other characters": ("/é", "／／evil.example.com", "//ｅvil.example.com", "/\u202e"),
    "a relative path": ("evil", "", "./", "../", "?a", "#a"),
    "a long path": ("/" + "a" * 2000,),
}
"""Forms of paths that browsers may understand as another origin, or that are no path."""


@pytest.mark.parametrize("form", ELSEWHERE)
def test_a_path_to_another_origin_is_not_returned_to(form: str) -> None:
    assert {local_path(path) for path in ELSEWHERE[form]} == {"/"}


@pytest.mark.parametrize("path", ["/", "/keys", "/keys?model=a&b=%2F", "/a//b", "/keys#top"])
def test_a_path_of_this_origin_is_returned_to(path: str) -> None:
    assert local_path(path) == path


def test_without_a_path_the_start_page_is_returned_to() -> None:
    assert local_path(None) == "/"


@given(st.text(alphabet="/\\.:@?#%ahtps \t\r\n\0é", max_size=30))
@example("/%2f%2fevil")
def test_no_text_leads_to_another_origin(text: str) -> None:
    path = local_path(text)
    # Browsers remove tabs and line breaks, and read a backslash as a slash (URL Standard, "basic URL parser").
    target = urlsplit(urljoin(f"{HERE}/sign-in/callback/x", path.translate(WHATWG).replace("\\", "/")))
    assert (target.scheme, target.netloc) == ("https", "llm.example.com")
    assert path.isascii() and path.isprintable()


def test_the_names_of_cookies_differ_by_port_and_are_bound_to_the_host_with_tls() -> None:
    kinds = (session_cookie, attempt_cookie)
    ports: tuple[Port, ...] = ("data", "admin")
    names = [make(port, secure=secure) for make in kinds for port in ports for secure in (True, False)]
    assert len(set(names)) == 8
    assert [name.startswith("__Host-") for name in names] == [True, False] * 4


def test_the_attributes_of_cookies() -> None:
    assert set_cookie("a", "v", 60.5) == "a=v; Path=/; Max-Age=60; HttpOnly; SameSite=Lax"
    assert set_cookie("__Host-a", "v", 60) == "__Host-a=v; Path=/; Max-Age=60; HttpOnly; SameSite=Lax; Secure"
    assert delete_cookie("a").startswith("a=; Path=/; Max-Age=0;")


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        ([b"a=1"], "1"),
        ([b"b=2; a=1"], "1"),
        ([b"b=2", b"a=1"], "1"),
        ([b"a=1; a=2"], None),
        ([b"a=1", b"a=1"], None),
        ([b"xa=1; A=2"], None),
        ([b"a"], ""),
        ([b"; ;=;a=\xff"], "ÿ"),
        ([], None),
    ],
)
def test_a_cookie_that_was_sent_twice_is_ignored(sent: list[bytes], value: str | None) -> None:
    assert cookie([(b"cookie", each) for each in sent], "a") == value


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ([(b"origin", b"https://llm.example.com")], True),
        ([(b"sec-fetch-site", b"same-origin")], True),
        ([(b"origin", b"https://llm.example.com"), (b"sec-fetch-site", b"same-origin")], True),
        ([], False),
        ([(b"origin", b"null")], False),
        ([(b"origin", b"https://evil.example.com")], False),
        ([(b"origin", b"http://llm.example.com")], False),
        ([(b"origin", b"https://llm.example.com:8443")], False),
        ([(b"origin", b"https://llm.example.com.evil.example.com")], False),
        ([(b"origin", b"https://llm.example.com"), (b"origin", b"https://evil.example.com")], False),
        ([(b"origin", b"https://evil.example.com"), (b"sec-fetch-site", b"same-origin")], False),
        ([(b"origin", b"https://llm.example.com"), (b"sec-fetch-site", b"cross-site")], False),
        ([(b"sec-fetch-site", b"same-site")], False),
        ([(b"sec-fetch-site", b"none")], False),
        ([(b"referer", b"https://llm.example.com/")], False),
    ],
)
def test_only_a_page_of_this_origin_may_change_something(headers: list[tuple[bytes, bytes]], own: bool) -> None:
    assert is_from_this_origin(headers, HERE) is own


@pytest.mark.parametrize(
    ("hosts", "own"),
    [
        ([b"llm.example.com"], True),
        ([b"LLM.example.com"], True),
        ([b"llm.example.com:443"], False),
        ([], False),
        ([b"evil.example.com"], False),
        ([b"llm.example.com", b"llm.example.com"], False),
    ],
)
def test_another_host_is_not_this_one(hosts: list[bytes], own: bool) -> None:
    assert is_for([(b"host", host) for host in hosts], HERE) is own
