"""The names under which limits count end users: a client cannot get a second count by writing a name in another way."""

from __future__ import annotations

from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.end_users import (
    counted_name,
    each_user,
    fixed_holders,
    named_by_body,
    named_by_header,
    on_arrival,
    other_users,
    owner_of,
    user_of,
    without_user,
)
from gateway.snapshot.snapshot import Allowance, Key, Limits, PerUser
from gateway.telemetry.request_record import USER_LIMIT

INVISIBLE = "\u200b\u200d\u2060\ufeff\u00ad\ufe0f\u034f\U000e0041\x00\x7f"
SPACES = " \t\n\u00a0\u2003\u3000"
HEADER = b"x-openwebui-user-id"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(text=texts, data=st.data())
def test_a_name_does_not_depend_on_how_it_is_written(text: str, data: st.DataObject) -> None:
    name = counted_name(text)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert counted_name(normalize(form, text)) == name
    assert counted_name(text.casefold()) == name
    at = data.draw(st.integers(0, len(text)))
    assert counted_name(text[:at] + data.draw(st.sampled_from(INVISIBLE)) + text[at:]) == name or at == 0 or text[at:], "in any place"
    around = data.draw(st.text(SPACES, max_size=3))
    assert counted_name(around + text + around) == name
    spaced = text[:at] + " " + text[at:]
    assert counted_name(text[:at] + data.draw(st.text(SPACES, min_size=1, max_size=3)) + text[at:]) == counted_name(spaced)


@given(text=st.text(st.sampled_from("aB\u00e9\u0301\u1e9e\u212b\u00df\u0130\ufb01\u0345 \u200d"), max_size=8), data=st.data())
def test_invisible_characters_do_not_make_a_name(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    assert counted_name(text[:at] + data.draw(st.sampled_from(INVISIBLE)) + text[at:]) == counted_name(text)


@given(text=texts)
def test_a_name_is_short_and_has_no_spaces(text: str) -> None:
    name = counted_name(text)
    if name is not None:
        assert 0 < len(name) <= 128 and name.isascii() and name.isprintable() and " " not in name


@given(one=st.text("abc019@._-%+:/ ", max_size=12), other=st.text("abc019@._-%+:/ ", max_size=12))
def test_distinct_users_have_distinct_names(one: str, other: str) -> None:
    assert (counted_name(one) == counted_name(other)) == (one.split() == other.split())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("7c1e0a34-5a2c-4b0e-9a43-1f8f5a6f2a11", "7c1e0a34-5a2c-4b0e-9a43-1f8f5a6f2a11"),
        ("Jane@Example.com", "jane@example.com"),
        ("Jane%20Doe", "jane%20doe"),
        ("  JANE   doe ", "jane%20doe"),
        ("J\u00fcrgen", "j%C3%BCrgen"),
        ("J%C3%BCrgen", "j%C3%BCrgen"),
        ("Ju\u0308rgen", "j%C3%BCrgen"),
        ("\uff2a\uff21\uff2e\uff25", "jane"),
        ("sha256:abc", "sha256%3Aabc"),
        ("", None),
        ("  \u200b ", None),
        ("%20", None),
        ("a" * USER_LIMIT, "sha256:02d7160d77e18c6447be80c2e355c7ed"),
        ("a" * (USER_LIMIT + 1), None),
    ],
)
def test_names_of_headers(text: str, name: str | None) -> None:
    assert named_by_header(text) == name


def test_a_key_names_its_end_users_in_one_way() -> None:
    headers = {HEADER: b"J%C3%BCrgen"}
    by_header = on_arrival(Key("a", user_header=HEADER), headers)
    assert (by_header.name, by_header.is_awaited, by_header.is_of_body) == ("j%C3%BCrgen", False, False)
    assert on_arrival(Key("a", user_header=HEADER), {b"other": b"x"}).name is None
    assert on_arrival(Key("a", user_header=HEADER), {HEADER: "J\u00fcrgen".encode("latin-1")}).name == "j%C3%BCrgen"
    by_body = on_arrival(Key("a"), headers)
    assert by_body.is_awaited and by_body.is_of_body and by_body.name is None, "the header is trusted only for a key that says so"
    assert named_by_body(Key("a"), " Jane ").name == "jane" and not named_by_body(Key("a"), " Jane ").is_awaited
    assert [named_by_body(Key("a"), field).name for field in (None, 7, ["jane"], "")] == [None] * 4
    subject = on_arrival(Key("staff/Alice", entry="staff"), headers)
    assert (subject.name, subject.is_awaited) == ("staff%2FAlice", False), "subjects are the issuer's, so case counts"
    assert on_arrival(Key("any", anonymous=True), headers) == (Key("any", anonymous=True), None, False, False)


def test_holders_of_an_owner() -> None:
    names = [each_user("key a"), user_of("key a", "jane"), without_user("key a"), other_users("key a")]
    assert names == ["key a each user", "key a user jane", "key a without user", "key a other users"]
    assert owner_of(each_user("team x")) == "team x"
    limits = Limits(concurrent=1)
    plain, shared = Allowance("key a", limits), Allowance("key a each user", limits, users=PerUser())
    assert fixed_holders(plain) == [plain]
    assert fixed_holders(shared) == [Allowance("key a other users", limits), Allowance("key a without user", limits)]
    refused = Allowance("key a each user", limits, users=PerUser("refused"))
    assert fixed_holders(refused) == [Allowance("key a other users", limits)]
