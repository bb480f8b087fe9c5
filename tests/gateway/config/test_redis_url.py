"""The URL of a limits store names hosts, Sentinels, or a socket."""

from __future__ import annotations

import re

import pytest

from gateway.config.redis_url import limits_store
from gateway.snapshot.snapshot import LimitsStore


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", LimitsStore((("h", 6379),))),
        ("rediss://me:a%40b@h:1/2", LimitsStore((("h", 1),), tls=True, user="me", password="a@b", database=2)),
        ("redis://:p@a,b:1,[::1]:2,[::1]/3", LimitsStore((("a", 6379), ("b", 1), ("::1", 2), ("::1", 6379)), password="p", database=3)),
        ("redis+sentinel://a,b:1/the%20name", LimitsStore((("a", 26379), ("b", 1)), "the name")),
        (
            "rediss+sentinel://me:p@a/name/4",
            LimitsStore((("a", 26379),), "name", tls=True, user="me", password="p", database=4),
        ),
        ("unix:///run/redis.sock?db=1", LimitsStore(path="/run/redis.sock", database=1)),
    ],
)
def test_addresses(url: str, expected: LimitsStore) -> None:
    assert limits_store(url) == expected


@pytest.mark.parametrize(
    ("url", "reported"),
    [
        ("redis://a,,b", "the host is missing: redis://localhost:6379/0"),
        ("redis://a,b:x", "the host or the port is not valid"),
        ("redis://[a,b", "the host or the port is not valid"),
        ("redis+sentinel://a", "the name of the primary is missing: redis+sentinel://localhost:26379/mymaster/0"),
        ("redis+sentinel://a//0", "the name of the primary is missing: redis+sentinel://localhost:26379/mymaster/0"),
        ("redis+sentinel://a/name/b", "the path must be the number of a database, as in redis://localhost:6379/0"),
    ],
)
def test_errors(url: str, reported: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reported)}$"):
        limits_store(url)


def test_a_store_is_named_without_its_password() -> None:
    assert str(limits_store("redis://me:p@a,b:1/0")) == "a:6379,b:1"
    assert str(limits_store("redis+sentinel://me:p@a,b:1/name/0")) == "a:26379,b:1/name"
