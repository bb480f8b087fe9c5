"""Hints for the operator about a server that the gateway does not launch and whose probe failed. Pure.

The rule: a hint is given only for a reason that has one likely cause. The reason itself is always shown too.
"""

from __future__ import annotations

import re

_HINTS = (
    (r"ConnectionRefusedError|Errno 111", "Nothing listens at this address. Start the server, or correct the host and port of its url."),
    (r"gaierror|Errno -[235]\b", "The host name cannot be resolved on this machine. Correct the host of its url."),
    (r"Errno (?:101|113)|unreachable|No route", "The machine cannot be reached. Check the network, and the host of its url."),
    (r"TimeoutError|timed out|no response within", "The server does not respond. Check the server, and firewalls on the way to it."),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError",
        "Its certificate is not trusted. Add its authority to the system, or correct the host.",
    ),
    (r"SSLError|WRONG_VERSION_NUMBER", "The server does not speak TLS. Write http:// in its url."),
    (r"FileNotFoundError|Errno 2\b", "The unix socket does not exist. Start the server, or correct the path of its url."),
    (r"PermissionError|Errno 13\b", "The gateway's user may not open the unix socket. Change the mode of the socket or of its folder."),
    (
        r"status 40[13]\b|requires a key|rejected the gateway's key",
        "The server rejects the gateway's key. Set api_key to a key of the server.",
    ),
    (r"status 404\b", "This is no vLLM server, or its url has a path. Write the url without /v1."),
)


def probe_hint(reason: str) -> str:
    """Return what to do about a failed probe, or an empty text."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, reason)), "")
