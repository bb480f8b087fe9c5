"""The settings for operators: tokens of the admin port, which must not be open, the audit log, notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import drafted
from gateway.config.references import problems as reference_problems
from tests.gateway.config.test_problems import problems

BASE = "models: [{id: m, launch: {}}]\nkeys: [{id: k, anonymous: true}]\n"
HASH = "sha256:" + "a" * 64
OPEN = "other machines could change keys here without authentication: set server.admin.tokens, or listen on 127.0.0.1"


@pytest.mark.parametrize(
    ("token", "reported"),
    [
        (f"{{name: a, hash: '{HASH}', role: viewer}}", []),
        (f"{{name: a, hash: '{HASH.upper().replace('SHA', 'sha')}', role: admin, expires: 2030-01-01}}", []),
        ("{name: a, hash: plain-token, role: viewer}", ["hash: expected sha256:"]),
        (f"{{name: a, hash: '{HASH}', role: owner}}", ["role: "]),
        (f"{{name: a, hash: '{HASH}', role: root}}", ["role: "]),
        (f"{{name: a, hash: '{HASH}'}}", ["role"]),
        (f"{{hash: '{HASH}', role: viewer}}", ["name"]),
        (f"{{name: a, hash: '{HASH}', role: viewer, expires: soon}}", ["expires: expected a date"]),
        (
            f"{{name: a, hash: '{HASH}', role: viewer}}, {{name: a, hash: '{'sha256:' + 'b' * 64}', role: admin}}",
            ["this token name is already"],
        ),
        (f"{{name: a, hash: '{HASH}', role: viewer}}, {{name: b, hash: '{HASH}', role: admin}}", ["this hash is already"]),
    ],
)
def test_tokens_are_checked(tmp_path: Path, token: str, reported: list[str]) -> None:
    found = problems(tmp_path, f"{BASE}server: {{admin: {{tokens: [{token}]}}}}\n")
    assert len(found) == len(reported) and all(part in problem for part, problem in zip(reported, found, strict=True)), found
    assert not any("plain-token" in problem for problem in found)


@pytest.mark.parametrize("section", ["store: ledger", "store: {url: 'sqlite:///keys.db'}", "sign_in: {issuers: []}"])
@pytest.mark.parametrize(
    ("admin", "is_open"),
    [
        ("{host: 0.0.0.0}", True),
        ("{host: '::'}", True),
        ("{host: 10.0.0.1, tokens: []}", True),
        ("{}", False),
        ("{host: 127.0.0.2}", False),
        ("{host: localhost}", False),
        ("{host: '::1'}", False),
        ("{host: 0.0.0.0, token: {env: TOKEN}}", False),
        (f"{{host: 0.0.0.0, tokens: [{{name: a, hash: '{HASH}', role: viewer}}]}}", False),
    ],
)
def test_an_open_admin_port_must_not_change_keys(tmp_path: Path, section: str, admin: str, is_open: bool) -> None:
    file = tmp_path / "g.yaml"
    for extra, expected in ((section, is_open), ("log: {}", False)):
        file.write_text(f"{BASE}server: {{admin: {admin}}}\n{extra}\n")
        draft = drafted(file)
        assert draft is not None
        assert (OPEN in [problem.message for problem in reference_problems(draft)]) == expected


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("audit: {secret: {env: SECRET}, file: a.jsonl}", []),
        ("audit: {secret: {env: SECRET}}\nledger: sqlite:///l.db", []),
        ("audit: {secret: {env: SECRET}}", ["audit: set audit.file, or store or ledger for its table"]),
        ("audit: {file: a.jsonl}", ["audit.secret: is missing"]),
        ("audit: {secret: a-secret-in-the-file, file: a.jsonl}", ["audit.secret: secrets must not be in this file"]),
        ("audit: {secret: {env: SHORT}, file: a.jsonl}", ["audit.secret: the secret has fewer than 16 characters"]),
        ("audit: {secret: {env: SECRET}, file: ''}", ["audit.file: expected the path of a file"]),
    ],
)
def test_the_audit_log_is_checked(tmp_path: Path, text: str, reported: list[str]) -> None:
    found = problems(tmp_path, f"{BASE}{text}\n", SECRET="s" * 16, SHORT="s" * 15)
    assert len(found) == len(reported) and all(part in problem for part, problem in zip(reported, found, strict=True)), found


SMTP = "smtp: {host: mail.example.com, from: gateway@example.com}\n"
HOOK = "name: ops, webhook: 'https://hooks.example.com/a'"


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (f"notices: [{{{HOOK}, secret: {{env: SECRET}}, at: [50%, 100%], for: key}}]", []),
        ("notices: [{name: ops, webhook: {env: HOOK}, for: [team, key]}]", []),
        (f"{SMTP}notices: [{{name: a, mail: {{to: ops@example.com}}}}, {{{HOOK}}}]", []),
        ("notices: [{name: ops, mail: {to: [ops@example.com]}}]", ["notices[0].mail: mail requires a mail server; set smtp"]),
        (f"notices: [{{{HOOK}}}, {{{HOOK}}}]", ["notices[1].name: this notice is already on line 3"]),
        ("notices: [{name: ops}]", ["notices[0]: set either webhook or mail"]),
        (f"{SMTP}notices: [{{{HOOK}, mail: {{to: a@b.c}}}}]", ["set either webhook or mail"]),
        (f"{SMTP}notices: [{{name: a, secret: {{env: SECRET}}, mail: {{to: a@b.c}}}}]", ["secret signs the requests of a webhook"]),
        (f"notices: [{{{HOOK}, secret: {{env: SHORT}}}}]", ["secret has fewer than 16 characters"]),
        (f"notices: [{{{HOOK}, at: []}}]", ["notices[0].at: "]),
        (f"notices: [{{{HOOK}, at: [0.8]}}]", ["expected a share in percent"]),
        (f"notices: [{{{HOOK}, at: [101%]}}]", ["a share is at most 100%"]),
        (f"notices: [{{{HOOK}, for: model}}]", ["notices[0].for"]),
        ("notices: [{name: ops, webhook: 'ftp://hooks.example.com'}]", ["webhook: expected a URL such as https://"]),
        ("notices: [{name: ops, webhook: 'https://user:hunter2@hooks.example.com'}]", ["passwords must not be in this file"]),
        (f"{SMTP}notices: [{{name: a, mail: {{to: Ops <ops@example.com>}}}}]", ["expected a mail address"]),
        ("smtp: {host: a, from: a@b.c, user: u}", ["set both user and password"]),
        ("smtp: {host: a, from: a@b.c, user: u, password: {env: SECRET}, tls: never}", ["a password is sent only with TLS"]),
    ],
)
def test_notices_are_checked(tmp_path: Path, text: str, reported: list[str]) -> None:
    found = problems(tmp_path, f"{BASE}{text}\n", SECRET="s" * 16, SHORT="s" * 15, HOOK="https://hooks.example.com/secret")
    assert len(found) == len(reported) and all(part in problem for part, problem in zip(reported, found, strict=True)), found
    assert not any("hunter2" in problem for problem in found)
