"""The settings of the admin port and of the audit log: tokens, and an admin port that must not be open."""

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
