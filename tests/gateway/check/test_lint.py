"""Notes on a valid configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from gateway.check.lint import notes
from gateway.config import drafted, load
from tests.support.certificates import dated

NOW = datetime(2027, 1, 1, tzinfo=UTC)
H1, H2 = (f"sha256:{letter * 64}" for letter in "ab")
PRICED = "models: [{id: dear, launch: {}, price: {prompt: 1}}, {id: free, aliases: [gratis], launch: {}}, SPLIT]\n".replace(
    "SPLIT", "{id: both, split: {dear: 1, gratis: 1}}"
)


def notes_on(folder: Path, text: str, keys: str | None = None) -> list[str]:
    """Return the notes on a valid configuration."""
    file = folder / "gateway.yaml"
    file.write_text(text)
    if keys is not None:
        (folder / "keys.yaml").write_text(keys)
    assert load(file).keys
    draft = drafted(file)
    assert draft is not None
    return [f"{Path(note.file).name}:{note.line}: {note.path}: {note.message}" for note in notes(draft, NOW)]


SHARED = "keys in SQLite are for one gateway, but `limits_store` is for several: they need PostgreSQL"
OPEN = (
    "gateway.yaml:1: server.admin.host: other machines can read /status, /keys and /usage on the admin port without a token: "
    "set server.admin.token"
)


@pytest.mark.parametrize(
    ("admin", "message"),
    [
        ("{host: 0.0.0.0}", OPEN),
        ("{host: '::'}", OPEN),
        ("{host: 10.0.0.7}", OPEN),
        ("{host: gateway.internal}", OPEN),
        ("{host: 0.0.0.0, token: {env: HOME}}", None),
        ("{host: 127.0.0.2}", None),
        ("{host: '::1'}", None),
        ("{host: localhost}", None),
        ("{}", None),
    ],
)
def test_an_admin_port_that_other_machines_reach_without_a_token(tmp_path: Path, admin: str, message: str | None) -> None:
    text = f"server: {{admin: {admin}}}\nmodels: [{{id: m, launch: {{}}}}]\nkeys: [{{id: a, hash: {H1}}}]\n"
    assert notes_on(tmp_path, text) == ([message] if message else [])


ENDED = "has expired: all keys of this entry are refused"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f"hash: {H1}, expires: 2027-01-01", f"keys.yaml:1: keys[0].expires: {ENDED}"),
        (f"hash: {{hash: {H1}, expires: 2026-01-01}}", f"keys.yaml:1: keys[0].hash: {ENDED}"),
        (f"hash: [{{hash: {H1}, expires: 2026-01-01}}, {H2}]", None),
        (f"hash: {H1}, expires: 2027-01-02", None),
        (f"hash: {H1}, expires: 2026-01-01, revoked: true", None),
        ("anonymous: true, expires: 2027-01-01", f"keys.yaml:1: keys[0].expires: {ENDED}"),
        ("anonymous: true, expires: 2027-01-02", None),
    ],
)
def test_a_key_that_has_ended(tmp_path: Path, key: str, message: str | None) -> None:
    text = "models: [{id: m, launch: {}}]\nkeys_file: keys.yaml\n"
    assert notes_on(tmp_path, text, f"- {{id: a, {key}}}\n") == ([message] if message else [])


def test_a_user_header_requires_a_ledger_or_a_limit(tmp_path: Path) -> None:
    text = f"models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: a, hash: {H1}, user_header: X-User}}]\n"
    assert notes_on(tmp_path, text) == ["gateway.yaml:2: keys[0].user_header: has no effect without `ledger` or `limits.per_user`"]
    assert notes_on(tmp_path, f"{text}ledger: sqlite:///usage.db\n") == []
    limited = text.replace("X-User}", "X-User, limits: {per_user: {concurrent: 1}}}")
    assert notes_on(tmp_path, limited) == []
    in_team = text.replace("X-User}", "X-User, team: t}") + "teams: [{id: t, limits: {per_user: {concurrent: 1}}}]\n"
    assert notes_on(tmp_path, in_team) == []


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (f"keys: [{{id: a, hash: {H1}, limits: {{cost_per_day: 1}}}}]", "keys[0].limits.cost_per_day"),
        (f"keys: [{{id: a, hash: {H1}, models: [gra*], limits: {{cost_per_month: 1}}}}]", "keys[0].limits.cost_per_month"),
        (f"keys: [{{id: a, hash: {H1}, limits: {{models: [{{models: ['*'], cost_per_day: 1}}]}}}}]",
         "keys[0].limits.models[0].cost_per_day"),
        (f"keys: [{{id: a, hash: {H1}, team: t}}]\nteams: [{{id: t, limits: {{cost_per_day: 1}}}}]", "teams[0].limits.cost_per_day"),
        (f"keys: [{{id: a, hash: {H1}, models: [dear], limits: {{cost_per_day: 1}}}}]", None),
        (f"keys: [{{id: a, hash: {H1}, limits: {{models: [{{models: [dear], cost_per_day: 1}}]}}}}]", None),
        (f"keys: [{{id: a, hash: {H1}, models: [dear], team: t}}]\nteams: [{{id: t, limits: {{cost_per_day: 1}}}}]", None),
        (f"keys: [{{id: a, hash: {H1}, limits: {{tokens_per_day: 1}}}}]", None),
        (f"keys: [{{id: a, hash: {H1}, models: [both], limits: {{cost_per_day: 1}}}}]", "keys[0].limits.cost_per_day"),
    ],
)  # fmt: skip
def test_a_cost_that_does_not_bound_what_is_free(tmp_path: Path, rest: str, message: str | None) -> None:
    line = 3 if "teams[" in (message or "") else 2
    expected = [f"gateway.yaml:{line}: {message}: does not limit models without a price: free"] if message else []
    assert notes_on(tmp_path, PRICED + rest + "\nledger: sqlite:///usage.db\n") == expected


RESET = "starts from zero at each restart"
SHORT = "gateway.yaml:3: ledger.retention: a restart restores budgets from the rows of their windows: keep rows for "


@pytest.mark.parametrize(
    ("limits", "more", "expected"),
    [
        ("{tokens_per_day: 1}", "", f"gateway.yaml:2: keys[0].limits.tokens_per_day: {RESET}: set ledger or limits_store"),
        (
            "{tokens_per_month: 1, models: [{models: ['*'], tokens_per_day: 1}]}",
            "",
            f"gateway.yaml:2: keys[0].limits.tokens_per_month: {RESET}, like 1 more: set ledger or limits_store",
        ),
        ("{tokens_per_minute: 1}", "", None),
        ("{tokens_per_day: 1}", "limits_store: redis://localhost", None),
        ("{tokens_per_month: 1}", "ledger: sqlite:///usage.db", None),
        ("{tokens_per_month: 1}", "ledger: {url: sqlite:///usage.db, retention: 31d}", None),
        ("{tokens_per_month: 1}", "ledger: {url: sqlite:///usage.db, retention: 30d}", f"{SHORT}31d"),
        ("{tokens_per_day: 1}", "ledger: {url: sqlite:///usage.db, retention: 30d}", None),
        ("{tokens_per_week: 1}", "ledger: {url: sqlite:///usage.db, retention: 6d}", f"{SHORT}7d"),
        ("{budgets: [{window: 48d, tokens: 1}]}", "ledger: {url: sqlite:///usage.db, retention: 49d}", f"{SHORT}50d"),
        ("{budgets: [{window: 48d, tokens: 1}]}", "ledger: {url: sqlite:///usage.db, retention: 50d}", None),
    ],
)
def test_a_budget_that_a_restart_resets(tmp_path: Path, limits: str, more: str, expected: str | None) -> None:
    text = f"{PRICED}keys: [{{id: a, hash: {H1}, limits: {limits}}}]\n{more}\n"
    assert notes_on(tmp_path, text) == ([expected] if expected else [])


def test_a_policy_without_the_packages_for_its_events(tmp_path: Path) -> None:
    text = f"models: [{{id: m, balance: cost, launch: {{}}}}]\nkeys: [{{id: a, hash: {H1}}}]\n"
    assert notes_on(tmp_path, text) == []
    program = "import sys; sys.modules['zmq'] = None; from gateway.cli.main import main; main()"
    line = [sys.executable, "-c", program, "check", str(tmp_path / "gateway.yaml")]
    done = subprocess.run(line, env=os.environ, capture_output=True, text=True, timeout=60)
    note = "models[0].balance: note: does not use KV cache events without the extra `kv-events` (pip install 'vllm-gateway[kv-events]')"
    assert note in " ".join(done.stdout.split())


def test_an_invalid_time_is_a_problem_and_no_note(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    ledger = "ledger: {url: sqlite:///usage.db, retention: soon}\n"
    file.write_text(f"models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: a, hash: {H1}, limits: {{tokens_per_day: 1}}}}]\n{ledger}")
    draft = drafted(file)
    assert draft is not None and list(notes(draft, NOW)) == []


@pytest.mark.parametrize(
    ("dates", "message"),
    [
        ((NOW - timedelta(days=90), NOW - timedelta(days=1)), "has expired on 2026-12-31 00:00 UTC, so clients reject it"),
        ((NOW - timedelta(days=90), NOW + timedelta(days=2)), "expires on 2027-01-03 00:00 UTC"),
        ((NOW - timedelta(days=1), NOW + timedelta(days=90)), None),
    ],
)
def test_a_certificate_that_has_expired_or_expires_soon(tmp_path: Path, dates: tuple[datetime, datetime], message: str | None) -> None:
    dated(tmp_path, *dates)
    text = f"server: {{tls: {{cert: cert.pem, key: key.pem}}}}\nmodels: [{{id: m, launch: {{}}}}]\nkeys: [{{id: a, hash: {H1}}}]\n"
    assert notes_on(tmp_path, text) == ([f"gateway.yaml:1: server.tls.cert: {message}"] if message else [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{store: sqlite:///keys.db, limits_store: redis://localhost}", f"1: store: {SHARED}"),
        ("{store: {url: sqlite:///keys.db}, limits_store: redis://localhost}", f"1: store.url: {SHARED}"),
        ("{store: ledger, ledger: sqlite:///usage.db, limits_store: redis://localhost}", f"1: store: {SHARED}"),
        ("store: sqlite:///keys.db", None),
        ("{store: postgresql://me@db/keys, limits_store: redis://localhost}", None),
        ("{store: ledger, ledger: postgresql://me@db/usage}", None),
    ],
)
def test_a_store_that_gateways_cannot_share(tmp_path: Path, settings: str, message: str | None) -> None:
    document = yaml.safe_load(settings) | {"models": [{"id": "m", "launch": {}}], "keys": [{"id": "a", "hash": H1}]}
    found = notes_on(tmp_path, json.dumps(document))
    assert found == ([f"gateway.yaml:{message}"] if message else [])


@pytest.mark.parametrize(("settings", "missing"), [("", "`sign_in` and `store`"), ("store: sqlite:///keys.db\n", "`sign_in`")])
def test_a_policy_without_people_or_a_store(tmp_path: Path, settings: str, missing: str) -> None:
    text = (
        f"models: [{{id: m, launch: {{}}}}]\nkeys: [{{id: a, hash: {H1}}}]\nteams: [{{id: t, self_service: {{max_keys: 1}}}}, {{id: u}}]\n"
    )
    assert notes_on(tmp_path, text + settings) == [f"gateway.yaml:3: teams[0].self_service: has no effect without {missing}"]


@pytest.mark.parametrize(
    ("model", "classes", "message"),
    [
        ("", "{id: chat, reserved_slots: 2}", "classes[0].reserved_slots: has no effect without `max_inflight` of a model"),
        ("max_inflight: 4", "{id: chat, reserved_slots: 2}", None),
        ("max_inflight: 4", "{id: chat, reserved_slots: 2}, {id: default}", None),
        (
            "max_inflight: 4",
            "{id: chat}, {id: default, reserved_slots: 2}",
            "classes[1].reserved_slots: has no effect: no class comes after this one",
        ),
        ("", "{id: chat, preempts: true}", "classes[0].preempts: has no effect without `max_inflight` of a model"),
        ("", "{id: chat, preempts: false}", None),
        ("max_inflight: 4", "{id: chat, preempts: true}", None),
        ("max_inflight: 4", "{id: default, preempts: true}", "classes[0].preempts: has no effect: no class comes after this one"),
    ],
)
def test_reserved_slots_and_preemption_without_effect(tmp_path: Path, model: str, classes: str, message: str | None) -> None:
    text = f"models: [{{id: m, launch: {{}}, {model}}}]\nkeys: [{{id: a, hash: {H1}}}]\nclasses: [{classes}]\n"
    assert notes_on(tmp_path, text) == ([f"gateway.yaml:3: {message}"] if message else [])
