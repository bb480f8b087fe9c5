"""Send a notice to its receiver: a webhook over HTTP, or mail over SMTP.

The rules: a receiver is only what the configuration names, so redirects are not followed. A reply is bounded in size and time, and reports
about a receiver contain neither its URL nor a secret. A signature covers the time and the body, so a receiver can reject old requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import smtplib
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from gateway.config import NoticeRule, Smtp
from upstream.daemon_thread import run_in_daemon_thread

SIGNATURE = "vllm-gateway-signature"
"""The header with the signature, in the form of Stripe's: ``t=TIME,v1=HMAC``."""
_TIMEOUT = 10.0  # seconds for a webhook, and for each step of SMTP
_MAIL_TIMEOUT = 30.0  # seconds for a mail
_MAX_REPLY = 1024  # bytes
_SHOWN_REPLY = 200  # characters


class Result(NamedTuple):
    """The result of an attempt as text. ``reply`` is the start of the receiver's reply."""

    is_sent: bool
    text: str
    reply: str = ""


def signature(secret: str, body: bytes, now: float) -> str:
    """Return the signature of a body at a time, in seconds since the epoch: an HMAC-SHA256 of the time, a dot and the body."""
    at = int(now)
    return f"t={at},v1={hmac.new(secret.encode(), b'%d.%b' % (at, body), hashlib.sha256).hexdigest()}"


class Sender:
    """Sends notices. It reads the trusted certificate authorities once, because that takes a tenth of a second."""

    def __init__(self) -> None:
        self._trusted: ssl.SSLContext | None = None

    async def send(self, rule: NoticeRule, smtp: Smtp | None, identity: str, body: str, now: float) -> Result:
        """Send the body of a notice with this ID to the receiver of a rule."""
        if self._trusted is None:
            self._trusted = await asyncio.to_thread(_trusted)
        trusted = self._trusted
        if rule.webhook is not None:
            return await _post(rule, trusted, identity, body.encode(), now)
        if rule.mail is None or smtp is None:
            return Result(False, "no mail server is configured")
        message = mail(rule.mail.to, smtp.sender, identity, msgspec.json.decode(body), now)
        try:
            async with asyncio.timeout(_MAIL_TIMEOUT):
                return await run_in_daemon_thread(lambda: _deliver(smtp, trusted, message), "notices-mail")
        except TimeoutError:
            return Result(False, f"the mail server did not finish within {_MAIL_TIMEOUT:g} s")


def _trusted() -> ssl.SSLContext:
    """Return a context with the authorities of the system, or those in the file that SSL_CERT_FILE names."""
    import httpx2  # loaded only where a notice is sent

    return httpx2.create_ssl_context()


# Webhooks


async def _post(rule: NoticeRule, trusted: ssl.SSLContext, identity: str, body: bytes, now: float) -> Result:
    import httpx2

    assert rule.webhook is not None
    url = rule.webhook.get_secret_value()
    headers = {"content-type": "application/json", "idempotency-key": identity, "user-agent": "vllm-gateway", "accept-encoding": "identity"}
    if rule.secret is not None:
        headers[SIGNATURE] = signature(rule.secret.get_secret_value(), body, now)
    try:
        async with (
            asyncio.timeout(_TIMEOUT),
            httpx2.AsyncClient(verify=trusted, timeout=_TIMEOUT, follow_redirects=False) as client,  # it uses the environment's proxy
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            reply = await _start_of(response)
    except TimeoutError:
        return Result(False, f"no response within {_TIMEOUT:g} s")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, ImportError) as error:  # the last two: a proxy of an unknown kind
        return Result(False, _without(url, str(error)) or type(error).__name__)
    return Result(response.is_success, f"status {response.status_code}", _without(url, reply))


async def _start_of(response: Any) -> str:
    """Return the start of a response, printable. The rest is not read."""
    found = b""
    async for part in response.aiter_raw():
        found += part
        if len(found) >= _MAX_REPLY:
            break
    return " ".join(found[:_MAX_REPLY].decode("utf-8", "replace").split())


def _without(url: str, text: str) -> str:
    """Return a text of or about a receiver without its URL, in one line of printable characters."""
    parts = urlsplit(url)
    for secret in (url, f"{parts.path}?{parts.query}", parts.path, parts.query, parts.password or ""):
        if len(secret) > 1:
            text = text.replace(secret, "***")
    return "".join(each for each in text if each.isprintable())[:_SHOWN_REPLY]


# Mail


def mail(to: tuple[str, ...], sender: str, identity: str, document: Mapping[str, Any], now: float) -> EmailMessage:
    """Return the mail of a notice. Its Message-ID is the notice's ID, by which mail systems recognize a repetition."""
    text = html.unescape(document["text"])
    message = EmailMessage()
    message["From"], message["To"] = sender, ", ".join(to)
    message["Subject"] = _subject(text)
    message["Date"] = format_datetime(datetime.fromtimestamp(now, UTC))
    message["Message-ID"] = f"<{identity}@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no automatic replies
    lines = (f"{name}: {value}" for name, value in document["data"].items() if value is not None)
    message.set_content("\n".join((text, "", *lines, f"id: {identity}", "")))
    return message


def _subject(text: str) -> str:
    return text.replace("`", "").partition(": ")[0].partition(". ")[0].rstrip(".")[:_SHOWN_REPLY]


def _deliver(smtp: Smtp, trusted: ssl.SSLContext, message: EmailMessage) -> Result:
    """Send a mail. It may take as long as the server does."""
    try:
        with _CONNECT[smtp.tls](smtp, trusted) as server:
            if smtp.user is not None and smtp.password is not None:
                server.login(smtp.user, smtp.password.get_secret_value())
            refused = server.send_message(message)
    except smtplib.SMTPResponseException as error:
        return Result(False, f"the mail server has refused it: {error.smtp_code}", _printable(error.smtp_error))
    except (smtplib.SMTPException, OSError) as error:  # a refused recipient is named in the error, which may be shown
        return Result(False, f"mail was not sent: {' '.join(str(error).split()) or type(error).__name__}"[:_SHOWN_REPLY])
    except ValueError:  # its text has a part of the password
        return Result(False, "the user or the password contains characters that the mail server does not accept")
    if refused:
        return Result(True, f"accepted, but not for {len(refused)} of the recipients", ", ".join(sorted(refused)))
    return Result(True, "accepted by the mail server")


def _plain(smtp: Smtp, _: ssl.SSLContext) -> smtplib.SMTP:
    return smtplib.SMTP(smtp.host, smtp.port, timeout=_TIMEOUT)


def _upgraded(smtp: Smtp, context: ssl.SSLContext) -> smtplib.SMTP:
    server = _plain(smtp, context)
    try:
        server.starttls(context=context)  # it raises if the server does not offer TLS
    except BaseException:
        server.close()
        raise
    return server


def _encrypted(smtp: Smtp, context: ssl.SSLContext) -> smtplib.SMTP:
    return smtplib.SMTP_SSL(smtp.host, smtp.port, timeout=_TIMEOUT, context=context)


_CONNECT: Mapping[str, Callable[[Smtp, ssl.SSLContext], smtplib.SMTP]] = {"starttls": _upgraded, "always": _encrypted, "never": _plain}


def _printable(text: bytes | str) -> str:
    shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return "".join(each for each in shown if each.isprintable())[:_SHOWN_REPLY]
