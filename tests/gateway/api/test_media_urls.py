"""Which URLs a server may be given, and where in a body they are looked for."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.api.media_urls import URL_FIELDS, InlineMedia, MediaHosts, is_entry, path_to, refused_url_field
from tests.support.rows import each_row

NONE, LISTED, ANY = (
    MediaHosts(),
    MediaHosts(["images.example.com", "*.cdn.example.com", "10.0.0.7", "local:8080", "*.deep.org:8443"]),
    MediaHosts(["*"]),
)
DATA = "data:image/png;base64,AAAA"


@each_row(
    "url",
    [
        "http://images.example.com/a.png",
        "https://images.example.com",
        "HTTPS://IMAGES.EXAMPLE.COM/a",
        "https://images.example.com:443/a?b=c&d=%20#e",
        "http://images.example.com:80",
        "http://a.cdn.example.com/x",
        "http://a.b.cdn.example.com/x",
        "http://10.0.0.7/x",
        "http://local:8080/x",
        "https://a.deep.org:8443/x",
        "https://images.example.com?x=http://evil.org",
    ],
)
def test_listed_places(url: str) -> None:
    assert LISTED.allows(url) and not NONE.allows(url)


AMBIGUOUS = [
    "",
    "/etc/passwd",
    "//images.example.com/a",
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "file://images.example.com/etc/passwd",
    "ftp://images.example.com/a",
    "gopher://images.example.com/a",
    "http:images.example.com",
    "http:/images.example.com",
    "http:///images.example.com",
    "http://images.example.com@evil.org/",
    "http://evil.org@images.example.com/",
    "http://user:pass@images.example.com/",
    "http://images.example.com\\@evil.org/",
    "http://evil.org\\@images.example.com/",
    "http://images.example.com/\\..\\x",
    "http://images.example.com#@evil.org:80\\",
    "http://images.example.com./",
    "http://.images.example.com/",
    "http://images..example.com/",
    "http://images.example.com:/",
    "http://images.example.com:0/",
    "http://images.example.com:081/",
    "http://images.example.com:99999999/",
    "http://images.example.com:80:80/",
    "http://images%2eexample.com/",
    "http://images.example.com%00.evil.org/",
    "http://images.example.com%23.evil.org/",
    "http://imageſ.example.com/",
    "http://ｉmages.example.com/",
    "http://images。example.com/",
    "http://images.example.com／evil",
    "http://images.example.com\u200b/",
    " http://images.example.com/",
    "http://images.example.com/ ",
    "http://images.example.com/\n",
    "http://images.example.com/a b",
    "http://images.example.com\t/",
    "ht\ntp://images.example.com/",
    "\x00http://images.example.com/",
    "http://[::1]/",
    "http://[::ffff:10.0.0.7]/",
    "http://[::ffff:a00:7]:80/",
    "http://167772167/",
    "http://0xa000007/",
    "http://0x0a.0.0.7/",
    "http://012.0.0.7/",
    "http://10.0.7/",
    "http://10.0.0.007/",
    "http://10.0.0.7./",
    "http://1.2.3.4.5/",
    "http://256.0.0.1/",
    "http://images.example.com/" + "a" * 10_000,
]


@each_row("url", AMBIGUOUS)
@each_row("hosts", [NONE, LISTED, ANY], ids=["none", "listed", "any"])
def test_what_could_be_read_in_two_ways(url: str, hosts: MediaHosts) -> None:
    assert not hosts.allows(url)


@each_row(
    "url",
    [
        "http://evil.org/",
        "http://xexample.com/",
        "http://cdn.example.com/",
        "http://xcdn.example.com/",
        "http://images.example.com.evil.org/",
        "http://example.com/",
        "http://images.example.com:8080/",
        "https://images.example.com:80/",
        "http://local/",
        "http://local:8081/",
        "http://10.0.0.8/",
        "https://a.deep.org/",
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
    ],
)
def test_other_places(url: str) -> None:
    assert not LISTED.allows(url)


def test_any_host_is_any_by_name() -> None:
    assert ANY.allows("http://evil.org/") and ANY.allows("https://intranet/x") and ANY.allows("http://xn--mller-kva.de/")
    assert not ANY.allows("http://127.0.0.1/") and not ANY.allows("http://evil.org:8080/")
    assert MediaHosts(["*:8080"]).allows("http://evil.org:8080/") and not MediaHosts(["*:8080"]).allows("http://evil.org/")


def test_data_is_always_allowed() -> None:
    assert all(hosts.allows(url) for hosts in (NONE, LISTED, ANY) for url in (DATA, DATA.upper(), "data:,"))


@pytest.mark.parametrize("entry", ["*", "*:8080", "a", "a.b", "*.b", "*.b:1", "10.0.0.7", "10.0.0.7:80", "A.B"])
def test_entries(entry: str) -> None:
    assert is_entry(entry)


@each_row(
    "entry", ["", "*.", ".a", "a.", "http://a", "a/b", "*a", "a.*", "**", "[::1]", "1", "10.0.0", "a:0", "a:b", "*.10.0.0.7", "ä", "a b"]
)
def test_what_is_no_entry(entry: str) -> None:
    assert not is_entry(entry)


@settings(deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"\Ahttps?://[a-z@:\\.\[\]%/0-9]{1,30}\Z"))
@example("http://a@images.example.com")
def test_whatever_passes_is_read_alike_by_others(url: str) -> None:
    """The host that Python's own parser finds is the listed host."""
    if LISTED.allows(url) and url[:5].lower() != "data:":
        parts = urlsplit(url)
        assert parts.hostname in ("images.example.com", "10.0.0.7", "local") or str(parts.hostname).endswith(
            (".cdn.example.com", ".deep.org")
        )
        assert parts.username is None and parts.scheme in ("http", "https")


def part(field: str, url: object) -> dict[str, Any]:
    return {"type": field, field: url}


URL = "http://169.254.169.254/"
INSIDE: list[Any] = [
    *([part(field, {"url": URL})] for field in sorted(URL_FIELDS)),
    *([part(field, URL)] for field in sorted(URL_FIELDS - {"source", "input_audio"})),
    [{"image_url": URL}],
    [{"image_url": URL, "uuid": "1", "type": "text", "text": "x"}],
    [{"image_url": URL, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, part("image_url", {"url": URL})]}],
    [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}],
    [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}]}],
    [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": URL}]}],
    [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": URL}]}],
    [{"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": URL}}],
    {"content": [part("image_url", {"url": URL})]},
    [[{"role": "user", "content": [part("video_url", {"url": URL})]}]],
    ["x"] * 100 + [{"content": [part("image_url", {"url": URL})]}],
    [part("image_url", {"url": ["data:"]})],
    [part("image_url", ["data:"])],
    [part("image_url", 7)],
]


def forbidden(value: Any, hosts: MediaHosts) -> str | None:
    pending, media, found = [value], InlineMedia(), None
    while pending and found is None:
        found = refused_url_field(pending, hosts, media, budget=1)
    whole = refused_url_field([value], hosts, at_once := InlineMedia())
    assert (found, media) == (whole, at_once), "in one step as in many"
    return None if whole is None else path_to(value, whole[0]) + whole[1]


def _below(value: Any, name: str) -> Any:
    return value[int(name)] if isinstance(value, list) else value[name]


def test_the_place_of_a_url_is_looked_for_among_so_many_values() -> None:
    sought = {"image_url": URL}
    assert path_to([{}] * 100 + [sought], sought) == "100."
    assert path_to([[{"a": [0] * 9}] * 5, [[[sought]]]], sought, budget=30) == ""
    assert path_to({"k" * 999: [sought]}, sought) == "k" * 64 + ".0."


@each_row("value", INSIDE, ids=str)
def test_a_url_anywhere_in_a_message(value: Any) -> None:
    path = forbidden(value, NONE)
    assert path is not None
    *above, last = path.split(".")
    assert last in URL_FIELDS and last in functools.reduce(_below, above, value), "the path leads to it"


@each_row(
    "value",
    [
        [],
        {},
        ["text"] * 100,
        [1, 2, 3],
        [{"role": "user", "content": f"See {URL}"}],
        [{"role": "user", "content": [{"type": "text", "text": URL}, part("image_url", {"url": DATA, "detail": "low"})]}],
        [{"type": "input_image", "image_url": DATA}, {"type": "input_image", "image_url": None}, {"type": "image_url", "uuid": "1"}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}],
        [{"type": "tool_use", "id": "1", "name": "look", "input": {"image_url": URL}}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": f'{{"image_url": "{URL}"}}'}}]}],
        [{"title": "a document", "source": "the web", "text": URL}],
    ],
    ids=str,
)
def test_what_no_server_fetches_passes(value: Any) -> None:
    assert forbidden(value, NONE) is None
