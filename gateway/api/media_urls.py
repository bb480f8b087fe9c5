"""Decide from which URLs a server may fetch images, audio and video: the URLs in a request body. Pure.

vLLM fetches any URL in a message, from inside the operator's network. The rule: a URL passes only if it has a single
interpretation. A URL that two parsers might read differently (user info, backslashes, escapes or non-ASCII letters in the host,
addresses in other bases, trailing dots) is refused before the list is consulted. ``file:`` never passes, ``data:`` always does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"
_NAME = rf"(?:{_LABEL}\.)*[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?"  # the last label starts with a letter, as no number in any base does
_IPV4 = r"(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"  # decimal, no leading zeros (RFC 3986)
_URL = re.compile(rf"(https?)://({_NAME}|{_IPV4})(?::([1-9]\d{{0,4}}))?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE | re.ASCII)  # no backslash
_ENTRY = re.compile(rf"(?:\*|(?:\*\.)?{_NAME}|{_IPV4})(?::[1-9]\d{{0,4}})?", re.ASCII)
_NUMBERS = re.compile(r"[\d.]+", re.ASCII)
_LONGEST = 8192  # characters of a URL other than a data: URL
_DEFAULT_PORTS = {"http": "80", "https": "443"}

URL_FIELDS = frozenset({"image_url", "input_image", "audio_url", "input_audio", "video_url", "input_video", "file_url", "source"})
"""Fields of a message part that contain a URL, or an object with a ``url``."""


def is_entry(text: str) -> bool:
    """Check whether a text is valid in a list of hosts: ``images.example.com``, ``*.example.com``, ``10.0.0.7:8080`` or ``*``."""
    return _ENTRY.fullmatch(text) is not None


class MediaHosts:
    """The hosts in a model's list. Without entries, only ``data:`` URLs pass.

    ``*`` is every host name; an IP address passes only if it is listed itself. An entry without a port is for the scheme's default
    port only.
    """

    __slots__ = ("_any", "_exact", "_suffixes", "listed")

    def __init__(self, entries: Iterable[str] = ()) -> None:
        listed = {entry.lower() for entry in entries}
        self.listed = tuple(sorted(listed))
        """The entries, for people."""
        hosts = {entry if ":" in entry else f"{entry}:" for entry in listed}
        self._any = frozenset(entry[1:] for entry in hosts if entry.startswith("*:"))
        self._suffixes = tuple(entry[1:] for entry in hosts if entry.startswith("*."))
        self._exact = frozenset(entry for entry in hosts if not entry.startswith("*"))

    def allows(self, url: str) -> bool:
        """Check whether a server may receive this URL."""
        if _is_data(url):
            return True
        found = _URL.fullmatch(url) if len(url) <= _LONGEST else None
        if found is None:
            return False
        scheme, host, port = found.groups("")
        host = host.lower()
        address = f"{host}:{'' if port and port == _DEFAULT_PORTS[scheme.lower()] else port}"
        if address in self._exact:
            return True
        if _NUMBERS.fullmatch(host):
            return False
        return address[len(host) :] in self._any or address.endswith(self._suffixes)


_NAME_LENGTH = 64  # characters of a client's field name in a path
_MAX_SEARCHED = 16_384  # values that are searched for the path of a refused URL
_TOGETHER = 4096  # items of a list that are searched together; the budget is exceeded by that many at most
_BASE64 = ";base64,"
_TYPE = 256  # characters that a media type may have
_ARGUMENTS = ("arguments", "input")
_SHORT = 32  # items that are examined one by one just as quickly
SCALARS = frozenset({str, int, float, bool, type(None)})
"""Types of JSON values without nested values."""
CONTAINERS = frozenset({dict, list})
"""Types of JSON values with nested values."""


class InlineMedia(msgspec.Struct):
    """The media that a body contains as base64: their number, and the characters of their URLs.

    ``in_arguments``: some may be in a list of arguments, where they are text for the model.
    """

    count: int = 0
    size: int = 0
    in_arguments: bool = False


def refused_url_field(
    pending: list[Any], hosts: MediaHosts, media: InlineMedia, budget: int = sys.maxsize
) -> tuple[dict[str, Any], str] | None:
    """Search for a refused URL in the objects and lists in ``pending``, which is emptied. ``media`` counts those that are found.

    Returns the object that contains it and the name of its field, or None. Stops after about ``budget`` values; the rest stays in
    ``pending``.
    """
    while pending and budget > 0:
        node = pending.pop()
        size = len(node)
        if size > _TOGETHER and type(node) is list:
            pending += [node[start : start + _TOGETHER] for start in range(0, size, _TOGETHER)]
            continue
        budget -= size + 1
        if type(node) is dict:
            if (name := _refused_of(node, hosts, media, pending)) is not None:
                return node, name
        elif size <= _SHORT or not SCALARS.issuperset(map(type, node)):  # otherwise it is a prompt of tokens, or a batch of texts
            for value in node:
                kind = type(value)
                if kind is dict:
                    if not value or (len(value) == 2 and "role" in value and type(value.get("content")) is str):
                        continue  # an ordinary message
                    pending.append(value)
                elif kind is list and value:
                    pending.append(value)
    return None


def _refused_of(node: dict[str, Any], hosts: MediaHosts, media: InlineMedia, pending: list[Any]) -> str | None:
    """Search one object. Its nested values are added to ``pending``."""
    if not URL_FIELDS.isdisjoint(node):
        for name in URL_FIELDS & node.keys():
            if (url := _url(name, node[name])) is None:
                continue
            if type(url) is not str or not hosts.allows(url):
                return name
            if _BASE64 in url[:_TYPE] and _is_data(url):
                media.count += 1
                media.size += len(url)
    for name, value in node.items():
        kind = type(value)
        if kind is list or (kind is dict and not _is_a_tools(name, node)):
            pending.append(value)
            if kind is list and name in _ARGUMENTS:
                media.in_arguments = media.in_arguments or _is_a_tools(name, node)
    return None


def path_to(root: Any, sought: dict[str, Any], budget: int = _MAX_SEARCHED) -> str:
    """Return the path to a nested object, with a trailing dot; empty if it is not among the first ``budget`` values."""
    level: list[tuple[Any, Any]] = [(root, None)]
    while level and budget > 0:
        below: list[tuple[Any, Any]] = []
        for node, link in level:
            if node is sought:
                return _dotted(link)
            budget -= len(node)
            items = node.items() if type(node) is dict else enumerate(node)
            below += [(value, (name, link)) for name, value in items if type(value) in CONTAINERS]
        level = below
    return ""


def _dotted(link: Any) -> str:
    """Join the names of a path, each of which links to its parent."""
    names = []
    while link is not None:
        name, link = link
        names.append(str(name)[:_NAME_LENGTH] + ".")
    return "".join(reversed(names))


def _is_a_tools(name: str, value: Mapping[str, Any]) -> bool:
    """Check whether a field contains the arguments of a tool call."""
    return name == "arguments" or (name == "input" and value.get("type") == "tool_use")


def _url(name: str, value: Any) -> Any:
    """Return the URL in a field. ``source`` and ``input_audio`` may also be plain text, which vLLM does not fetch."""
    if isinstance(value, dict):
        return value.get("url")
    return None if name in ("source", "input_audio") else value


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"
