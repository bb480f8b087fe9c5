"""Notices: their texts, their IDs, and the windows in which each is sent once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Config, NoticeRule
from gateway.config import Key as ConfiguredKey
from gateway.fleet.snapshot_builder import stored_key
from gateway.key_management.key_list import expiry
from gateway.limits.windows import BudgetState, moment, windows_of
from gateway.notices.notice import EXPIRY_NOTICE, Notice, budget_notices, expiry_notices, expiry_of, trial_notice, window_of
from gateway.snapshot.snapshot import Allowance, Budget, Limits, PerUser

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()  # a Wednesday
MOMENTS = st.floats(0, 4_000_000_000)
HASHES = [f"sha256:{number:064}" for number in range(3)]


def rule(name: str = "ops", **more: Any) -> NoticeRule:
    return NoticeRule.model_validate({"name": name, "webhook": "https://hooks.example.com/a", **more})


def found(used: float, limits: Limits, *rules: NoticeRule, holder: str = "key alice", wall: float = NOON, **more: Any) -> list[Notice]:
    states = [BudgetState(each, window.name, used, 0.0) for window in windows_of(limits) for each in window.budgets]
    return list(budget_notices(rules or [rule()], Allowance(holder, limits, **more), states, moment(0.0, wall)))


def test_each_share_that_is_reached_is_announced() -> None:
    limits = Limits(tokens_per_day=1000)
    assert [len(found(used, limits)) for used in (0, 799, 800, 999, 1000, 5000)] == [0, 0, 1, 1, 2, 2]
    (notice,) = found(830, limits)
    document = json.loads(notice.body(NOON))
    assert document["text"] == ("Key `alice` has used 80% of tokens_per_day: 830 of 1,000 tokens. Requests beyond it are refused.")
    assert (document["id"], document["event"], document["subject"]) == (notice.id, "budget.threshold", "key alice")
    assert document["data"] == {
        "holder": "key", "name": "alice", "owner": None, "models": None, "limit": "tokens_per_day", "soft": False, "threshold": 0.8,
        "amount": 1000, "used": 830, "window_start": "2026-11-25T00:00:00Z", "window_end": "2026-11-26T00:00:00Z",
    }  # fmt: skip


def test_costs_and_models_are_written_as_the_configuration_has_them() -> None:
    (notice,) = found(1_600_000_000, Limits(cost_per_month=2_000_000_000), holder="team lab for b/*", models=("b/*",))
    assert "Team `lab` has used 80% of cost_per_month for `b/*`: 1.6 of 2." in notice.text
    assert (json.loads(notice.body(NOON))["data"]["amount"], notice.subject) == (2, "team lab")


def test_end_users_are_named_with_their_key_and_only_for_rules_that_watch_them() -> None:
    limits, users = Limits(tokens_per_day=100), PerUser()
    names = {name: name.removeprefix("user ") for name in ("user jane", "user @here", "other users", "without user")}
    for terms, name in names.items():
        holder = f"key chat {terms}"
        assert found(100, limits, rule(), holder=holder, users=users) == [], "by default, they are not watched"
        (notice,) = found(90, limits, rule(**{"for": "user"}), holder=holder, users=users)
        assert notice.text.startswith(f"Key `chat` (`{terms}`) has used 80% of tokens_per_day: 90 of 100 tokens.")
        assert {name: notice.data[name] for name in ("holder", "name", "owner")} == {"holder": "user", "name": name, "owner": "key chat"}
        assert notice.subject == holder
    assert found(100, limits, rule(**{"for": "user"}), holder="key chat") == []
    once, again = ([found(100, limits, rule(**{"for": "user"}), holder=f"key chat {terms}", users=users, wall=wall) for terms in names]
                   for wall in (NOON, NOON + 60))  # fmt: skip
    assert [[each.id for each in notices] for notices in once] == [[each.id for each in notices] for notices in again]
    assert len({each.id for notices in once for each in notices}) == 8


def test_a_soft_budget_says_that_it_only_warns() -> None:
    limits = Limits(tokens_per_day=100, budgets=(Budget("day", tokens=100, soft=True),))
    notices = found(100, limits)
    assert len({notice.id for notice in notices}) == 4
    assert sum("This budget only warns." in notice.text for notice in notices) == 2


def test_a_rule_sees_only_its_kinds_of_holders() -> None:
    limits, rules = Limits(tokens_per_day=10), [rule("keys", **{"for": "key"}), rule("teams", **{"for": ["team"], "at": ["50%"]})]
    assert {notice.rule for notice in found(10, limits, *rules)} == {"keys"}
    assert {notice.rule for notice in found(10, limits, *rules, holder="team alice")} == {"teams"}
    assert {notice.rule for notice in expiry_notices(rules, "alice", NOON + 5, NOON)} == {"keys"}


def test_an_id_is_that_of_the_window_and_no_other() -> None:
    limits = Limits(tokens_per_day=10, budgets=(Budget("2h", 7200, tokens=10),))
    ids = [sorted(notice.id for notice in found(10, limits, wall=wall)) for wall in (NOON, NOON + 3600, NOON + 7200, NOON + 86400)]
    assert ids[0] == ids[1]
    assert len(set(ids[1]) & set(ids[2])) == 2  # the day is the same, the two hours are others
    assert not set(ids[0]) & set(ids[3])
    others = [found(20, Limits(tokens_per_day=20)), found(10, limits, rule("other")), found(10, limits, holder="key bob")]
    assert not any(notice.id in ids[0] for notices in others for notice in notices)


@given(MOMENTS, st.sampled_from(["day", "week", "month", "7d", "90m"]))
def test_a_window_has_each_moment_once(wall: float, name: str) -> None:
    seconds = {"7d": 7 * 86400.0, "90m": 5400.0}.get(name, 0.0)
    (window,) = windows_of(Limits(budgets=(Budget(name, seconds, tokens=1),)))
    start, end = window_of(window, moment(0.0, wall))
    assert start <= wall < end
    assert window_of(window, moment(0.0, start)) == (start, end) == window_of(window, moment(0.0, end - 1))
    assert window_of(window, moment(0.0, end))[0] == end


def test_a_key_is_announced_in_its_last_week() -> None:
    expires = NOON + EXPIRY_NOTICE
    walls = (NOON - 1, NOON, expires - 1, expires, expires + 1)
    assert [len(list(expiry_notices([rule()], "alice", expires, wall))) for wall in walls] == [0, 1, 1, 0, 0]
    first, last = (next(expiry_notices([rule()], "alice", expires, wall)) for wall in (NOON, expires - 1))
    assert first == last
    assert first.text == "Key `alice` expires at 2026-12-02T12:00:00Z. After that, requests with it are refused."


_DATES = st.none() | st.datetimes(datetime(2026, 1, 1), datetime(2028, 1, 1)).map(lambda when: when.replace(tzinfo=UTC).isoformat())


@given(_DATES, st.lists(_DATES, min_size=1, max_size=3), st.booleans())
def test_the_expiry_of_a_key_is_that_of_the_list_of_keys(expires: str | None, hashes: list[str | None], revoked: bool) -> None:
    listed = [text if end is None else {"hash": text, "expires": end} for text, end in zip(HASHES, hashes, strict=False)]
    key = ConfiguredKey.model_validate({"id": "alice", "hash": listed, "expires": expires, "revoked": revoked})
    known = expiry(key)
    assert expiry_of(stored_key(key, Config(), None)) == (None if known is None else known.timestamp())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_name_cannot_mention_anyone(name: str) -> None:
    (notice,) = expiry_notices([rule()], f"<!channel>`{name}", NOON + 1, NOON)
    assert notice.text.count("`") == 2
    assert "<" not in notice.text
    assert ">" not in notice.text
    assert json.loads(notice.body(NOON))["data"]["name"] == f"<!channel>`{name}"


@pytest.mark.parametrize("reserved", ["type", "channel", "username", "icon_url", "attachments", "blocks", "props", "priority"])
def test_no_field_has_a_meaning_in_a_chat(reserved: str) -> None:
    assert reserved not in json.loads(trial_notice(rule(), "1", NOON).body(NOON))
