"""Receivers: signed webhooks and mail, over real sockets, also with receivers that misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from gateway.config import NoticeRule, Smtp
from gateway.notices.notice import Notice, trial_notice
from gateway.notices.receivers import SIGNATURE, Result, Sender, mail, signature
from tests.support.certificates import certificate
from tests.support.ports import refusing
from tests.support.smtp_server import Mailbox, smtp_server
from tests.support.webhooks import receiver

NOW = 1_790_000_000.5
SECRET = "a-secret-of-the-tests"


def hook(url: str, secret: str | None = SECRET) -> NoticeRule:
    return NoticeRule.model_validate({"name": "ops", "webhook": url, "secret": None if secret is None else SecretStr(secret)})


def letters(*to: str) -> NoticeRule:
    return NoticeRule.model_validate({"name": "mail", "mail": {"to": list(to or ("ops@example.com",))}})


def sent(rule: NoticeRule, smtp: Smtp | None = None, notice: Notice | None = None) -> Result:
    made = notice or trial_notice(rule, "1", NOW)
    return asyncio.run(Sender().send(rule, smtp, made.id, made.body(NOW), NOW))


@given(st.text(min_size=16, max_size=40), st.binary(max_size=200), st.floats(0, 4e9))
def test_a_signature_covers_the_time_and_the_body(secret: str, body: bytes, now: float) -> None:
    at, _, mac = signature(secret, body, now).partition(",v1=")
    assert at == f"t={int(now)}"
    assert mac == hmac.new(secret.encode(), f"{int(now)}.".encode() + body, hashlib.sha256).hexdigest()
    assert mac not in signature(secret, body + b"x", now)
    assert mac not in signature(secret, body, now + 1)


def test_a_webhook_gets_the_body_its_id_and_its_signature() -> None:
    with receiver() as ops:
        assert sent(hook(ops.url)) == Result(True, "status 200", "ok")
        ((headers, body),) = ops.attempts
        assert headers[SIGNATURE] == signature(SECRET, body, NOW)
        assert headers["idempotency-key"] == json.loads(body)["id"]
        assert headers["content-type"] == "application/json"
        assert sent(hook(ops.url, None)).is_sent
        assert SIGNATURE not in ops.attempts[1][0]


def test_a_redirect_is_not_followed() -> None:
    with receiver(1.0) as ops:
        ops.random = random.Random(1)
        results = [sent(hook(ops.url)) for _ in range(20)]
        assert len(ops.attempts) == 20
    assert not any(result.is_sent for result in results)
    assert {"status 302", "status 500", "status 503", "status 429"} <= {result.text for result in results}


def test_a_reply_is_cut_and_does_not_repeat_the_url() -> None:
    with receiver(path="/services/T0/secret?x=1", reply=b"/services/T0/secret\x1b[31m\n" + b"x" * 5_000_000) as ops:
        ops.reply = ops.url.encode() + ops.reply
        result = sent(hook(ops.url))
    assert "secret" not in result.reply
    assert result.reply.isprintable()
    assert len(result.reply) <= 200


@pytest.mark.parametrize(
    "url", ["ftp://example.com/a", "https://", "http://:80/a", "https://a:99999/b", "https://a b/c", "https://[::1/x", "https://u:p@a/b"]
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        hook(url)


def test_receivers_that_do_not_respond() -> None:
    with refusing() as port:
        result = sent(hook(f"http://127.0.0.1:{port}/services/secret"))
    assert not result.is_sent
    assert "secret" not in result.text


def test_a_certificate_that_is_not_trusted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = certificate(tmp_path)
    settings = {"host": "localhost", "from": "gateway@example.com", "user": "gateway", "password": SecretStr("right")}
    for always in (False, True):
        with smtp_server(pair, always=always) as box:
            smtp = Smtp.model_validate(settings | {"port": box.port, "tls": "always" if always else "starttls"})
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            assert not sent(letters(), smtp).is_sent
            assert (box.mails, box.logins) == ([], [])
            monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
            assert sent(letters(), smtp) == Result(True, "accepted by the mail server")
            assert (box.logins, box.protected) == ([("gateway", "right")], [True])


def test_the_password_is_not_sent_without_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    with smtp_server(pair, offers_tls=False) as box:
        fields = {"host": "localhost", "port": box.port, "from": "gateway@example.com", "user": "gateway", "password": SecretStr("right")}
        assert not sent(letters(), Smtp.model_validate(fields)).is_sent
        assert (box.logins, box.mails) == ([], [])


def plain(box: Mailbox, **more: Any) -> Smtp:
    return Smtp.model_validate({"host": "127.0.0.1", "port": box.port, "tls": "never", "from": "gateway@example.com", **more})


def test_a_mail_has_the_text_and_the_id() -> None:
    rule = letters("a@example.com", "b@example.com")
    text = "Key `käse&lt;1` has used 80% of tokens_per_day: 8 of 10 tokens. Requests beyond it are refused."
    notice = Notice("notice_1", "mail", "budget.threshold", "key käse", text, {"used": 8, "models": None}, NOW)
    with smtp_server() as box:
        assert sent(rule, plain(box), notice).is_sent
    (found,) = box.mails
    assert (found["from"], found["to"]) == ("gateway@example.com", "a@example.com, b@example.com")
    assert found["subject"] == "Key käse<1 has used 80% of tokens_per_day"
    assert found["message-id"] == "<notice_1@example.com>"
    content = found.get_content().replace("\r\n", "\n")
    assert content.startswith("Key `käse<1` has used 80% of tokens_per_day: 8 of 10 tokens.")
    assert "used: 8\n" in content
    assert "models" not in content


def test_mail_servers_that_refuse() -> None:
    with smtp_server(refuses=frozenset({"a@example.com"})) as box:
        assert sent(letters("a@example.com", "b@example.com"), plain(box)) == Result(
            True, "accepted, but not for 1 of the recipients", "a@example.com"
        )
        assert not sent(letters("a@example.com"), plain(box)).is_sent
    with refusing() as port:
        assert not sent(letters(), Smtp.model_validate({"host": "127.0.0.1", "port": port, "tls": "never", "from": "a@b.c"})).is_sent
    assert not sent(letters(), None).is_sent


@given(st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"))))
def test_no_name_adds_a_header(name: str) -> None:
    document = {"text": f"Key `{name}` expires at 2026.", "data": {"name": name}}
    written = mail(("ops@example.com",), "gateway@example.com", "notice_1", document, NOW).as_bytes()
    head = written.partition(b"\n\n")[0]
    names = {line.partition(b":")[0].lower() for line in head.splitlines() if line[:1] not in (b" ", b"\t")}
    assert names == {b"from", b"to", b"subject", b"date", b"message-id", b"auto-submitted", b"content-type",
                     b"content-transfer-encoding", b"mime-version"}  # fmt: skip
