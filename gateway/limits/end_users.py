"""Find the end user of a request, in the form in which limits count it. Pure.

The rules: a key names its end users in one way, so a client cannot choose between two names. Texts that differ only in case, in spaces, in
their Unicode form or in invisible characters are one end user. A text without visible characters names none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple
from unicodedata import category, normalize
from urllib.parse import quote, unquote_to_bytes

from gateway.snapshot.snapshot import Allowance, Key
from gateway.telemetry.request_record import USER_LIMIT

_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]")
"""Default_Ignorable_Code_Point of Unicode, without the characters of category Cf."""
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf"})
_ROUNDS = 4
"""One round is enough for nearly all texts. Removed and folded characters can make others combine."""
_PLAIN = "@+=~,"
LONGEST_NAME = 128
"""Characters of a name in messages and in Redis."""


class EndUser(NamedTuple):
    """The end user of a request of a key. ``name`` is that of ``counted_name``, None without an end user.

    ``is_of_body``: the key names its end users in the body. ``is_awaited``: the body has not been read yet.
    """

    key: Key
    name: str | None = None
    is_of_body: bool = False
    is_awaited: bool = False


def on_arrival(key: Key, headers: Mapping[bytes, bytes]) -> EndUser:
    """Return the end user as far as the headers of a request name it. The subject of a token is its own end user."""
    if key.entry is not None:
        return EndUser(key, shown_name(key.id))
    if key.user_header is not None:
        return EndUser(key, named_by_header(header_text(headers.get(key.user_header, b""))))
    return EndUser(key) if key.anonymous else EndUser(key, is_of_body=True, is_awaited=True)


def named_by_body(key: Key, field: object) -> EndUser:
    """Return the end user that the field ``user`` of a body names."""
    return EndUser(key, counted_name(field) if isinstance(field, str) else None, is_of_body=True)


def named_by_header(text: str) -> str | None:
    """Return the name of the end user that a header names. Open WebUI encodes names as in URLs, so each header is decoded."""
    return counted_name(header_text(unquote_to_bytes(text)) if "%" in text else text)


def header_text(value: bytes) -> str:
    """Decode a header's value. Names beyond ASCII come as UTF-8, or from older clients as Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def counted_name(text: str) -> str | None:
    """Return the name under which limits count an end user. None: the text has nothing visible, or more than ``USER_LIMIT`` characters.

    Case is folded, compatible characters (NFKC) are the same, spaces around the text are removed, and spaces within it count as one.
    """
    if len(text) > USER_LIMIT:
        return None
    for _ in range(_ROUNDS):
        folded = _folded(text)
        if folded == text:
            break
        text = folded
    return shown_name(text) if text else None


def _folded(text: str) -> str:
    if text.isascii() and text.isprintable():
        return " ".join(text.lower().split())
    folded = normalize("NFKC", normalize("NFKC", _visible(text)).casefold())
    return normalize("NFC", " ".join(_visible(folded).split()))


def _visible(text: str) -> str:
    """Return the text without invisible characters. One between two accents would keep them out of canonical order."""
    return "".join(each for each in _UNSEEN.sub("", text) if each.isspace() or category(each) not in _UNSEEN_CATEGORIES)


def shown_name(text: str) -> str:
    """Return a text as a part of a holder's name, encoded as in URLs, so that it has no spaces. A long text is replaced by its SHA-256."""
    name = quote(text, safe=_PLAIN, errors="surrogatepass")
    return name if len(name) <= LONGEST_NAME else f"sha256:{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


# Names of holders. The limits of end users belong to the key or team ``owner``.


def owner_of(holder: str) -> str:
    """Return the key or team whose limits of end users have this holder."""
    return holder.removesuffix(_EACH)


def each_user(owner: str) -> str:
    """Return the holder of the configured limits of end users. Nothing counts for it."""
    return owner + _EACH


def user_of(owner: str, name: str) -> str:
    """Return the holder that counts an end user."""
    return f"{owner} user {name}"


def without_user(owner: str) -> str:
    """Return the holder that counts the requests without an end user."""
    return f"{owner} without user"


def other_users(owner: str) -> str:
    """Return the holder that counts all end users beyond the bound."""
    return f"{owner} other users"


def user_parts(holder: str) -> tuple[str, str]:
    """Return the key or team of a holder that counts end users, and which it counts: two terms. No ID contains a space."""
    owner, *terms = holder.rsplit(" ", 2)
    return owner, " ".join(terms)


def fixed_holders(allowance: Allowance) -> list[Allowance]:
    """Return the holders of an allowance that exist whatever clients send: for end users, those that several of them share."""
    users, owner = allowance.users, owner_of(allowance.holder)
    if users is None:
        return [allowance]
    names = [other_users(owner), *([without_user(owner)] if users.missing == "shared" else [])]
    return [replace(allowance, holder=name, users=None) for name in names]


_EACH = " each user"
