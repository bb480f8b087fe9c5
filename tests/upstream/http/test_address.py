"""A server's URL, read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rows import each_row
from upstream.http.address import Address


@each_row(
    ("url", "address", "authority", "shown"),
    [
        ("http://10.0.0.5:8000", Address("10.0.0.5", 8000), "10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("http://vllm", Address("vllm", 80), "vllm", "http://vllm"),
        ("https://vllm", Address("vllm", 443, tls=True), "vllm", "https://vllm"),
        ("https://vllm:80", Address("vllm", 80, tls=True), "vllm:80", "https://vllm:80"),
        ("http://[::1]:8000", Address("::1", 8000), "[::1]:8000", "http://[::1]:8000"),
        ("http://a:1/", Address("a", 1), "a:1", "http://a:1"),
        ("http://a:1/v1", Address("a", 1), "a:1", "http://a:1"),
        ("http://a:1/v1/", Address("a", 1), "a:1", "http://a:1"),
        ("http://a:1/tiny/v1", Address("a", 1, prefix="/tiny"), "a:1", "http://a:1/tiny"),
        ("unix:/run/vllm.sock", Address("localhost", uds="/run/vllm.sock"), "localhost", "unix:/run/vllm.sock"),
        ("unix:///run/vllm.sock", Address("localhost", uds="/run/vllm.sock"), "localhost", "unix:/run/vllm.sock"),
    ],
)
def test_what_is_read(url: str, address: Address, authority: str, shown: str) -> None:
    assert Address.parse(url) == address
    assert (address.authority, str(address)) == (authority, shown)
    assert Address.parse(str(address)) == address


@each_row(
    "url",
    ["", "a:1", "ftp://a", "http://", "http:///x", "http://a:b", "http://a:70000", "http://user@a", "http://:secret@a", "http://a?x=1", "http://a#b",
     "unix:", "unix://", "http://[::1", "http://a b", "http://a\r\nx: y", "http://a/b\r\nx: y", "http://a/b c", "http://a/\u00e4", "http://a..b"],
)  # fmt: skip
def test_what_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Address.parse(url)


@settings(deadline=None)
@given(st.text(max_size=30).map(lambda rest: "http://" + rest))
def test_what_is_accepted_makes_a_head(url: str) -> None:
    """Whatever is accepted fits into a request's head, one line each."""
    try:
        address = Address.parse(url)
    except ValueError:
        return
    for part in (address.authority, address.prefix):
        part.encode("ascii")
        assert part.isprintable() and " " not in part
    assert 0 < address.port < 65536
