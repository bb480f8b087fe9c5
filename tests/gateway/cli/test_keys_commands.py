"""Commands for keys: create, rotate, revoke, list and import keys; and their edits of the file."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import yaml

from gateway.api.errors import Refusal
from gateway.auth.keyring import Keyring
from gateway.auth.keys import has_valid_checksum, hash_of, mint
from gateway.config import Config, Limits, load
from gateway.fleet.observed_servers import ObservedServers
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.key_management.key_file import KeyFileError, KeyFiles
from tests.gateway.cli.test_main import Ran, gateway

KEY, OLDER = mint("team-a"), mint("team-a")
FILE = f"""\
# The gateway of the second floor.
models:
    - {{id: Qwen/Q, servers: [{{url: "http://10.0.0.1"}}]}}    # the only one

keys:
  # whoever is first
  - id: team-a     # do not touch
    hash: {hash_of(KEY)}
    models: ["Qwen/*"]
  - id: two
    hash:
      - {hash_of("one")}   # the laptop
      - {hash_of("two")}
  - {{id: anonymous, anonymous: true}}   # everybody

# where to log
log: {{level: info}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gateway.yaml").write_text(FILE)
    return tmp_path


def key_or_refusal(config: Config, token: str) -> str:
    """Return the id of the key that a token belongs to, or the reason of its refusal."""
    ring = Keyring(build_snapshot(config, ObservedServers({}, {}, {}), 1, 0).keys)
    try:
        return ring.authenticate(f"Bearer {token}".encode()).id
    except Refusal as refusal:
        return f"{refusal.code}: {refusal}"


def removed(before: str, after: str) -> list[str]:
    """Return the lines of one text that are not in the other."""
    left = after.splitlines()
    return [line for line in before.splitlines() if line not in left]


def secret(ran: Ran) -> str:
    """Return the key that a command printed; check that it was printed once."""
    key = ran.out.splitlines()[0]
    assert ran.code == 0 and has_valid_checksum(key) and (ran.out + ran.err).count(key) == 1 and "not shown again" in ran.err
    return key


def test_a_new_key_is_written_only_on_request(folder: Path) -> None:
    ran = gateway(
        "keys", "new", "--id", "team-b", "--models", "Qwen/*", "--expires", "2999-01-01", "--requests-per-minute", "60", "--write",
        folder=folder,
    )  # fmt: skip
    key, text = secret(ran), (folder / "gateway.yaml").read_text()
    assert ran.err.startswith("team-b is in gateway.yaml\n")
    assert removed(FILE, text) == [] and key not in text
    made = load(folder / "gateway.yaml").keys[-1]
    assert made.limits is not None and (made.models, made.limits.requests_per_minute) == (("Qwen/*",), 60)
    assert key_or_refusal(load(folder / "gateway.yaml"), key) == "team-b"
    assert secret(gateway("keys", "new", "--id", "team-c", "--config", "gateway.yaml", folder=folder))


def test_every_limit_of_the_configuration_can_be_given(folder: Path) -> None:
    nested = {"models", "budgets", "session", "per_user"}
    names = [name for name in Limits.model_fields if name not in nested]
    given = [number for name in names for number in (f"--{name.replace('_', '-')}", "7")]
    (folder / "gateway.yaml").write_text(FILE.replace("servers:", "price: {prompt: 1}, servers:") + "teams: [{id: research}]\n")
    secret(gateway("keys", "new", "--id", "b", "--team", "research", *given, "--write", folder=folder))
    made = load(folder / "gateway.yaml").keys[-1]
    assert made.limits is not None and made.team == "research"
    assert made.limits.model_dump(exclude=nested) == dict.fromkeys(names, 7)
    shown = gateway("keys", "new", "--help", folder=folder).out
    assert "--cost-per-month N" in shown and "cost per month (UTC)" in " ".join(shown.split())


def test_the_list_shows_budgets_by_their_names(folder: Path) -> None:
    budgets = "[{window: 168h, tokens: 100, cost: 0.25}, {window: month, tokens: 5, soft: true}]"
    limits = f"limits: {{cost_per_week: 0.5, session: {{tokens: 7}}, budgets: {budgets}}}"
    (folder / "gateway.yaml").write_text(
        FILE.replace("servers:", "price: {prompt: 1}, servers:").replace("  - id: two\n", f"  - id: two\n    {limits}\n")
    )
    shown = " ".join(gateway("keys", "list", folder=folder).out.split())
    assert "cost_per_week 0.5, tokens_per_7d 100, cost_per_7d 0.25, soft tokens_per_month 5, tokens_per_session 7" in shown


def test_a_new_key_is_written_to_the_keys_file_if_the_main_file_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("models: [{id: m, launch: {}}]\nkeys_file: more/keys.yaml\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "keys.yaml").write_text(f"# ours\n- {{id: a, hash: {hash_of('a')}}}\n")
    key = secret(gateway("keys", "new", "--id", "b", "--write", folder=tmp_path))
    assert (tmp_path / "more" / "keys.yaml").read_text().startswith(f'# ours\n- {{id: a, hash: {hash_of("a")}}}\n- id: "b"\n')
    assert key_or_refusal(load(tmp_path / "gateway.yaml"), key) == "b"
    assert gateway("keys", "revoke", "a", folder=tmp_path) == Ran(0, "a is revoked in more/keys.yaml\n", "")
    text = (tmp_path / "more" / "keys.yaml").read_text() + "- {id: c, hash: none}\n"
    (tmp_path / "more" / "keys.yaml").write_text(text)
    assert gateway("keys", "revoke", "b", folder=tmp_path).code == 0, "what was wrong before is no reason to refuse"
    ran = gateway("keys", "new", "--id", "c", "--write", folder=tmp_path)
    assert ran == Ran(1, "", "vllm-gateway: c exists already; `vllm-gateway keys rotate c` gives it a new key\n")


def test_a_rotated_key_overlaps_with_the_former_key(folder: Path) -> None:
    new = secret(gateway("keys", "rotate", "team-a", "--overlap", "1h", folder=folder))
    text, config = (folder / "gateway.yaml").read_text(), load(folder / "gateway.yaml")
    assert removed(FILE, text) == [f"    hash: {hash_of(KEY)}"]
    [former, latter] = config.keys[0].hashes
    assert (former.text, latter.text, latter.expires) == (hash_of(KEY), hash_of(new), None)
    assert former.expires is not None
    assert timedelta(minutes=58) < former.expires - datetime.now(UTC) <= timedelta(hours=1)
    assert (key_or_refusal(config, KEY), key_or_refusal(config, new)) == ("team-a", "team-a")
    # the next rotation removes an expired hash; a valid hash keeps its expiry
    ended = text.replace(former.expires.strftime("%Y-%m-%dT%H:%M:%SZ"), "2020-01-01T00:00:00Z")
    (folder / "gateway.yaml").write_text(ended)
    assert key_or_refusal(load(folder / "gateway.yaml"), KEY) == "expired_api_key: This API key has expired."
    newest = secret(gateway("keys", "rotate", "team-a", folder=folder))
    assert [one.text for one in load(folder / "gateway.yaml").keys[0].hashes] == [hash_of(new), hash_of(newest)]


@pytest.mark.parametrize("file_kind", ["entry", "hash"])
def test_the_former_key_keeps_an_earlier_expiry(folder: Path, file_kind: str) -> None:
    end = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    expiring = f"{hash_of(KEY)}\n    expires: {end}" if file_kind == "entry" else f"{{hash: {hash_of(KEY)}, expires: {end}}}"
    (folder / "gateway.yaml").write_text(FILE.replace(hash_of(KEY), expiring))
    assert f"; the former key is valid until {end}\n" in gateway("keys", "rotate", "team-a", folder=folder).err


def test_a_key_can_be_replaced_at_once(folder: Path) -> None:
    new = secret(gateway("keys", "rotate", "two", "--overlap", "0s", folder=folder))
    config = load(folder / "gateway.yaml")
    assert key_or_refusal(config, new) == "two"
    assert [one.text for one in config.keys[1].hashes] == [hash_of(new)]


def test_comments_beside_hashes_stay(folder: Path) -> None:
    secret(gateway("keys", "rotate", "two", folder=folder))
    text = (folder / "gateway.yaml").read_text()
    assert f"      - {{hash: {hash_of('one')}, expires: " in text and "}   # the laptop\n" in text


def test_a_revoked_key_is_refused_even_if_anonymous_requests_are_served(folder: Path) -> None:
    assert key_or_refusal(load(folder / "gateway.yaml"), "one") == "two"
    assert gateway("keys", "revoke", "two", folder=folder) == Ran(0, "two is revoked in gateway.yaml\n", "")
    config = load(folder / "gateway.yaml")
    assert key_or_refusal(config, "one") == key_or_refusal(config, "two") == "invalid_api_key: This API key has been revoked."
    assert key_or_refusal(config, "unknown") == "anonymous"
    assert gateway("keys", "revoke", "two", folder=folder) == Ran(0, "two is already revoked\n", "")
    assert gateway("keys", "verify", "gateway.yaml", stdin="one", folder=folder) == Ran(1, "", "vllm-gateway: two: revoked\n")
    assert gateway("keys", "rotate", "two", folder=folder).err == "vllm-gateway: two is revoked, which would apply to its new key\n"
    assert gateway("keys", "restore", "two", folder=folder) == Ran(0, "two is restored in gateway.yaml\n", "")
    assert key_or_refusal(load(folder / "gateway.yaml"), "one") == "two"
    assert gateway("keys", "restore", "two", folder=folder) == Ran(0, "two is not revoked\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["rotate", "team-x"], 1, "vllm-gateway: there is no key team-x in gateway.yaml"),
        (["revoke", "anonymous"], 1, "vllm-gateway: anonymous is for requests without a key; remove it from the file to refuse them"),
        (["rotate", "team-a", "--overlap", "soon"], 2, "vllm-gateway: --overlap: expected a duration with its unit"),
        (
            ["new", "--id", "team-a", "--write"],
            1,
            "vllm-gateway: team-a exists already; `vllm-gateway keys rotate team-a` gives it a new key",
        ),
        (["new", "--id", "b", "--models", "nothing", "--write"], 2, "gateway.yaml: keys[3].models[0]: matches no model"),
        (["new", "--id", "b", "--concurrent", "0"], 2, "vllm-gateway: --concurrent: expected 1 or more, found 0"),
        (["new", "--id", "b", "--cost-per-day", "-1"], 2, "vllm-gateway: --cost-per-day: expected more than 0.0, found -1.0"),
        (["new", "--id", "b", "--tokens-per-day", "1M"], 2, "vllm-gateway: Invalid value for '--tokens-per-day': expected a whole number"),
        (["new", "--id", "b", "--cost-per-day", "1e"], 2, "vllm-gateway: Invalid value for '--cost-per-day': expected a number without"),
        (["new", "--id", "b", "--models", ""], 2, "vllm-gateway: --models: expected some text, found nothing"),
        (["new", "--id", "b", "--expires", ""], 2, "vllm-gateway: --expires: expected a date such as 2027-01-01 or a time"),
        (["new", "--id", "b", "--expires", "2020-01-01"], 2, "vllm-gateway: --expires: the date is in the past"),
        (["new", "--id", "b", "--team", "nobody", "--write"], 2, "gateway.yaml: keys[3].team: there is no such team"),
        (["rotate", "team-a", "--overlap", "9999999d"], 2, "vllm-gateway: --overlap: the end is after the year 9999"),
        (["revoke", "team-a", "--config", "other.yaml"], 1, "vllm-gateway: other.yaml cannot be read: No such file or directory"),
        (["import", "other.txt"], 1, "vllm-gateway: other.txt cannot be read: No such file or directory"),
    ],
)
def test_a_refused_change_is_explained_and_the_file_stays(folder: Path, arguments: list[str], code: int, expected: str) -> None:
    ran = gateway("keys", *arguments, folder=folder)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert ran.err.startswith(expected)
    assert (folder / "gateway.yaml").read_text() == FILE
    assert [path.name for path in folder.iterdir()] == ["gateway.yaml"]


def test_a_form_that_cannot_be_edited_is_not_changed(folder: Path) -> None:
    text = "models: [{id: m, launch: {}}]\nkeys: ~\n"
    (folder / "gateway.yaml").write_text(text)
    ran = gateway("keys", "new", "--id", "a", "--write", folder=folder)
    assert ran.code == 1 and ran.out == "" and "gateway.yaml cannot be edited automatically" in ran.err
    assert (folder / "gateway.yaml").read_text() == text


def test_a_value_from_a_yaml_merge_is_set_next_to_the_merge(folder: Path) -> None:
    text = f"models: [{{id: m, launch: {{}}}}]\nkeys:\n  - {{id: a, <<: &h {{hash: {hash_of('a')}}}}}\n"
    (folder / "gateway.yaml").write_text("\ufeff" + text)
    key = secret(gateway("keys", "rotate", "a", folder=folder))
    config = load(folder / "gateway.yaml")
    assert (key_or_refusal(config, "a"), key_or_refusal(config, key)) == ("a", "a")
    assert (folder / "gateway.yaml").read_text().startswith("\ufeffmodels: [{id: m, launch: {}}]\n")


def test_the_files_mode_owner_and_link_stay(folder: Path) -> None:
    real = folder / "elsewhere" / "real.yaml"
    real.parent.mkdir()
    (folder / "gateway.yaml").rename(real)
    (folder / "gateway.yaml").symlink_to(real)
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 12345, 23456)
    before = real.stat()
    assert gateway("keys", "revoke", "team-a", folder=folder).code == 0
    after = real.stat()
    assert (folder / "gateway.yaml").is_symlink() and "revoked: true" in real.read_text()
    assert (stat.S_IMODE(after.st_mode), after.st_uid, after.st_gid) == (0o640, before.st_uid, before.st_gid)


def test_concurrent_commands_do_not_undo_each_other(folder: Path) -> None:
    """Each command either writes its entry, or reports that another program changed the file."""
    files = [KeyFiles(folder / "gateway.yaml") for _ in range(8)]
    at_once = Barrier(len(files))

    def add(number: int) -> str:
        at_once.wait(60)
        try:
            files[number].add([{"id": f"new-{number}", "hash": hash_of(str(number))}])
        except KeyFileError as error:
            return str(error)
        return f"new-{number}"

    with ThreadPoolExecutor(len(files)) as pool:
        results = set(pool.map(add, range(len(files))))
    written = {key.id for key in load(folder / "gateway.yaml").keys if key.id.startswith("new-")}
    assert written and results - written == {f"{folder}/gateway.yaml was changed by another program in the meantime; try again"}


def test_a_secret_that_is_not_available_here_does_not_block_a_change(folder: Path) -> None:
    server = "    - {id: far, servers: [{url: 'http://10.0.0.1', api_key: {env: NOT_SET_HERE}}]}\n"
    (folder / "gateway.yaml").write_text(FILE.replace("\nkeys:", server + "\nkeys:", 1))
    assert gateway("keys", "revoke", "team-a", folder=folder) == Ran(0, "team-a is revoked in gateway.yaml\n", "")


def test_the_list(folder: Path) -> None:
    soon, (end, *_) = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%dT%H:%M:%SZ"), ("2020-01-01T00:00:00Z",)
    more = f"""  - {{id: ending, hash: [{{hash: {hash_of("x")}, expires: {soon}}}], limits: {{requests_per_minute: 5}}, team: research}}
  - {{id: ended, hash: {hash_of("y")}, expires: {end}}}
  - {{id: gone, hash: {hash_of("z")}, revoked: true}}
"""
    text = FILE.replace("\n# where", more + "teams: [{id: research}]\n\n# where")
    (folder / "gateway.yaml").write_text(text)
    ran = gateway("keys", "list", "--json", folder=folder)
    listed: dict[str, dict[str, Any]] = {one["id"]: one for one in json.loads(ran.out)}
    assert {name: one["state"] for name, one in listed.items()} == {
        "team-a": "valid", "two": "valid", "anonymous": "no key", "ending": "ends soon", "ended": "expired", "gone": "revoked",
    }  # fmt: skip
    assert listed["ending"] == {
        "id": "ending", "state": "ends soon", "team": "research", "labels": {}, "models": ["*"], "expires": None, "hashes": 1,
        "hashes_end": [soon],
        "tokens": False, "limits": {"requests_per_minute": 5}, "last_used": None,
    }  # fmt: skip
    plain = gateway("keys", "list", folder=folder)
    assert plain.code == 0 and "sha256" not in plain.out and "requests_per_minute 5" in plain.out
    assert plain.out.split()[:4] == ["id", "team", "state", "models"]
    assert [line.split()[:2] for line in plain.out.splitlines()[1:]] == [[name, one["team"] or "-"] for name, one in listed.items()]


def litellm(token: str, **more: Any) -> dict[str, Any]:
    """Return a key as LiteLLM lists it."""
    return {"token": hash_of(token).removeprefix("sha256:"), **more}


LITELLM = {
    "keys": [
        litellm("sk-l1", key_alias="lite", models=["Qwen/Q"], expires="2999-05-01T10:00:00Z", rpm_limit=10, tpm_limit=1000,
                max_parallel_requests=2),
        litellm("sk-l2", key_alias=None, models=["all-proxy-models"], blocked=True),
    ],
    "total_count": 2,
}  # fmt: skip
FIRST, SECOND, THIRD, FOURTH = (f"sk-{number}-0123456789" for number in ("first", "second", "third", "fourth"))


def test_keys_of_another_gateway_stay_valid(folder: Path) -> None:
    (folder / "keys.txt").write_text(f'# exported\n{FIRST}\nalice,{SECOND}\n\n{KEY}\nbob , "{THIRD}"\ncarol,{hash_of(FOURTH)}\n')
    ran = gateway("keys", "import", "keys.txt", folder=folder)
    assert ran == Ran(0, "4 keys added to gateway.yaml; 1 was already known\n", "")
    text, config = (folder / "gateway.yaml").read_text(), load(folder / "gateway.yaml")
    assert "sk-" not in text and removed(FILE, text) == []
    first = f"imported-{hash_of(FIRST).removeprefix('sha256:')[:8]}"
    owners = {FIRST: first, SECOND: "alice", THIRD: "bob", FOURTH: "carol", KEY: "team-a"}
    assert {token: key_or_refusal(config, token) for token in owners} == owners
    assert gateway("keys", "import", "keys.txt", folder=folder).out == "0 keys added to gateway.yaml; 5 were already known\n"


@pytest.mark.parametrize(
    ("lines", "owners"),
    [
        (f"key,id\n{FIRST},alice\n", {FIRST: "alice"}),
        (f"# exported\n\nName, API_Key\nalice,{FIRST}\n", {FIRST: "alice"}),
        (f'"token","alias"\n"{FIRST}","alice"\n', {FIRST: "alice"}),
        (f"key\n{FIRST}\n", {FIRST: f"imported-{hash_of(FIRST).removeprefix('sha256:')[:8]}"}),
    ],
)
def test_a_header_line_names_the_column_of_the_key(folder: Path, lines: str, owners: dict[str, str]) -> None:
    (folder / "keys.txt").write_text(lines)
    assert gateway("keys", "import", "keys.txt", folder=folder).out == "1 key added to gateway.yaml\n"
    config = load(folder / "gateway.yaml")
    assert {token: key_or_refusal(config, token) for token in owners} == owners
    assert FIRST not in (folder / "gateway.yaml").read_text() and len(config.keys) == 4


def test_hashes_of_litellm_keys_are_imported(folder: Path) -> None:
    (folder / "keys.json").write_text(json.dumps(LITELLM))
    assert gateway("keys", "import", "keys.json", folder=folder) == Ran(0, "2 keys added to gateway.yaml\n", "")
    config = load(folder / "gateway.yaml")
    assert key_or_refusal(config, "sk-l1") == "lite"
    assert key_or_refusal(config, "sk-l2").startswith("invalid_api_key: This API key has been revoked")
    lite = next(key for key in config.keys if key.id == "lite")
    assert lite.limits is not None and lite.expires is not None
    assert (lite.models, lite.limits.concurrent, lite.limits.tokens_per_minute, lite.expires.year) == (("Qwen/Q",), 2, 1000, 2999)


def priced(folder: Path) -> None:
    """Write a configuration with a priced model and a team."""
    text = FILE.replace("servers:", "price: {prompt: 1}, servers:") + "teams: [{id: research}]\n"
    (folder / "gateway.yaml").write_text(text)


def test_limits_of_litellm_keys_are_imported_or_reported_as_left_out(folder: Path) -> None:
    priced(folder)
    listed = [
        litellm("1", key_alias="month", max_budget=5, budget_duration="30d", spend=1.5, team_id="research"),
        litellm("2", key_alias="day", max_budget=0.5, budget_duration="24h", team_id="2f0c-4d"),
        litellm("3", key_alias="ever", max_budget=5.0),
        litellm("4", key_alias="two weeks", max_budget=5, budget_duration="14d", models=["all-team-models"]),
        litellm("5", key_alias="none", max_budget=0, rpm_limit=0, metadata={"model_rpm_limit": {"m": 1}}, allowed_routes=["/embeddings"]),
        litellm("6", key_alias="week", max_budget=5, budget_duration="7d"),
    ]
    (folder / "keys.json").write_text(json.dumps({"keys": listed}))
    ran = gateway("keys", "import", "keys.json", folder=folder)
    assert (ran.code, ran.out) == (0, "6 keys added to gateway.yaml\n")
    made = {key.id: key for key in load(folder / "gateway.yaml").keys}
    limits = {name: made[name].limits for name in ("month", "day", "ever", "two-weeks", "none", "week")}
    assert {name: each.model_dump(exclude_defaults=True) for name, each in limits.items() if each is not None} == {
        "month": {"cost_per_month": 5.0}, "day": {"cost_per_day": 0.5}, "week": {"cost_per_week": 5.0},
    }  # fmt: skip
    assert (made["month"].team, made["day"].team) == ("research", None)
    weeks = "max_budget with a budget_duration other than a day, a week or a month"
    nothing = "max_budget 0 (a limit here is more than 0), rpm_limit 0 (a limit here is 1 or more)"
    assert [line.removeprefix("vllm-gateway: keys.json: ") for line in ran.err.splitlines()] == [
        "key 1 (month): left out: spend (its budget restarts at 0)",
        "key 2 (day): left out: team_id (the configuration has no such team)",
        "key 3 (ever): left out: max_budget without budget_duration (a limit here is for a day, a week or a month)",
        f"key 4 (two weeks): left out: the spaces of its key_alias, {weeks}, all-team-models (it may use all models here)",
        f"key 5 (none): left out: {nothing}, allowed_routes, model_rpm_limit",
    ]  # fmt: skip


def test_a_duplicate_key_in_a_file_is_reported(folder: Path) -> None:
    (folder / "keys.txt").write_text(f"alice,{FIRST}\nbob,{SECOND}\nalice,{FIRST}\n{KEY}\n")
    warning = "vllm-gateway: keys.txt: line 3 is line 1 again\n"
    assert gateway("keys", "import", "keys.txt", folder=folder) == Ran(0, "2 keys added to gateway.yaml; 1 was already known\n", warning)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a b,{FIRST}\n", "line 1, id: must not contain spaces or control characters"),
        (f"{FIRST},the-owner-of-this-1\n", "line 1: the id looks like a key; expected a key, or id,key, or a first line key,id"),
        (json.dumps([litellm("a"), litellm("b", key_alias="b", models=["gpt-4"])]), "key 2 (b), models[0]: matches no model"),
        (json.dumps([litellm("a", key_alias="a", max_budget=1, budget_duration="1mo")]),
         "key 1 (a), limits.cost_per_month: no model has a price, so no request has a cost; set models[].price"),
        (json.dumps([litellm("one"), litellm("b", key_alias="b", models=5)]), "key 2 (b), models: expected a list, found 5; write [5]"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_imported_is_reported_and_nothing_is_written(folder: Path, text: str, expected: str) -> None:
    (folder / "keys.txt").write_text(text)
    assert gateway("keys", "import", "keys.txt", folder=folder) == Ran(1, "", f"vllm-gateway: keys.txt: {expected}\n")
    assert (folder / "gateway.yaml").read_text() == FILE


def test_a_hash_can_have_an_expiry_in_every_form(tmp_path: Path) -> None:
    one = {"hash": hash_of("x"), "expires": "2999-01-01"}
    for written in (hash_of("x"), [hash_of("x")], one, [one], [one, hash_of("y")]):
        file = tmp_path / "gateway.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "models": [{"id": "m", "servers": [{"url": "http://10.0.0.1"}]}],
                    "keys": [{"id": "k", "hash": written, "expires": "2998-01-01"}],
                }
            )
        )
        assert key_or_refusal(load(file), "x") == "k"
    for wrong in ({"hash": hash_of("x"), "ends": 1}, {"expires": "2999-01-01"}, [{"hash": "x"}], {"hash": hash_of("x"), "expires": "soon"}):
        file.write_text(
            yaml.safe_dump({"models": [{"id": "m", "servers": [{"url": "http://10.0.0.1"}]}], "keys": [{"id": "k", "hash": wrong}]})
        )
        ran = gateway("check", "gateway.yaml", folder=tmp_path)
        assert ran.code == 2 and ": keys[0].hash" in ran.out and ran.out.count("\n") == 1
