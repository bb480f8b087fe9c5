"""Decide which notices a budget or an expiry causes, with their text, data and ID. Pure.

The rules: an ID is derived from what the notice is about, so every gateway makes the same ID, also after a restart. Names in texts are
written as code, and characters with a meaning in Slack are escaped, so a name cannot mention a channel or a person.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from gateway.config import NoticeRule
from gateway.key_management.key_list import instant_of, last_expiry
from gateway.limits.end_users import user_parts
from gateway.limits.windows import SLICES, BudgetState, Moment, Window, counted_starts, windows_of
from gateway.snapshot.money import decimal_text, json_number
from gateway.snapshot.snapshot import Allowance, Key

EXPIRY_NOTICE = 7 * 86400.0
"""Seconds before the expiry of a key at which it is announced."""
_TEST_SECONDS = 3600.0
_SHOWN_NAME = 200  # characters


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice of a rule.

    ``subject`` is the holder of the budget, or the key that expires. ``text`` is one line for people, ``data`` the same for programs.
    ``end`` is the time from which it has no meaning, in seconds since the epoch: the end of the budget's window, or the expiry.
    """

    id: str
    rule: str
    event: str
    subject: str
    text: str
    data: Mapping[str, Any]
    end: float

    def body(self, created: float) -> str:
        """Return the JSON that is sent. Slack and Mattermost show its ``text`` and ignore the rest, so no other name is one of theirs."""
        document = {"text": self.text, "id": self.id, "event": self.event, "created": instant_of(created), "subject": self.subject}
        return msgspec.json.encode({**document, "data": self.data}).decode()


def _kind(allowance: Allowance) -> str:
    """Return the kind of a holder, as rules name it. The name of a key's or team's holder starts with it."""
    return "user" if allowance.users is not None else allowance.holder.partition(" ")[0]


def budget_notices(rules: Sequence[NoticeRule], allowance: Allowance, states: Iterable[BudgetState], at: Moment) -> Iterator[Notice]:
    """Yield the notices about the budgets of a holder that have reached a share, at a moment."""
    kind = _kind(allowance)
    wanted = [rule for rule in rules if kind in rule.holders]
    least = min((share for rule in wanted for share in rule.at), default=None)
    for state in states:
        if least is None or state.used < least * state.budget.limit:
            continue
        window = next(each for each in windows_of(allowance.limits) if each.name == state.window)
        for rule in wanted:
            yield from (_budget(rule, allowance, state, share, window, at) for share in rule.at if state.used >= share * state.budget.limit)


def _budget(rule: NoticeRule, allowance: Allowance, state: BudgetState, share: float, window: Window, at: Moment) -> Notice:
    start, end = window_of(window, at)
    budget, limit, used = state.budget, int(state.budget.limit), int(state.used)
    amounts = (decimal_text(used), decimal_text(limit)) if budget.is_cost else (f"{used:,}", f"{limit:,}")
    unit = "" if budget.is_cost else " tokens"
    holder = allowance.holder.partition(" for ")[0]
    owner, users = (holder, None) if allowance.users is None else user_parts(holder)
    kind, _, name = owner.partition(" ")
    models = f" for {', '.join(map(_code, allowance.models))}" if allowance.models else ""
    effect = "This budget only warns." if budget.soft else "Requests beyond it are refused."
    shown = f"{kind.capitalize()} {_code(name)}" + (f" ({_code(users)})" if users else "")
    reached = f"{shown} has used {_percent(share)} of {budget.name}{models}"
    text = f"{reached}: {amounts[0]} of {amounts[1]}{unit}. {effect}"
    data = {
        "holder": _kind(allowance),
        "name": users.removeprefix("user ") if users else name,
        "owner": owner if users else None,
        "models": allowance.models,
        "limit": budget.name,
        "soft": budget.soft,
        "threshold": share,
        "amount": json_number(limit) if budget.is_cost else limit,
        "used": json_number(used) if budget.is_cost else used,
        "window_start": instant_of(start),
        "window_end": instant_of(end),
    }
    about = (allowance.holder, budget.name, budget.soft, limit, share, start)
    return Notice(_id(rule.name, "budget.threshold", *about), rule.name, "budget.threshold", holder, text, data, end)


def window_of(window: Window, at: Moment) -> tuple[float, float]:
    """Return the start and the end of the window in which a budget is announced once, in seconds since the epoch.

    A rolling window has neither. For it, time is divided into windows of its length, from the epoch on.
    """
    if window.slice_seconds:
        length = round(window.slice_seconds * SLICES)
        start = at.wall // length * length
        return start, start + length
    return counted_starts(window, at)[0], float(at.period_ends[window.calendar])


def expiry_notices(rules: Iterable[NoticeRule], key: str, expires: float, wall: float) -> Iterator[Notice]:
    """Yield the notices about a key that expires within 7 days. Times are in seconds since the epoch."""
    if not wall < expires <= wall + EXPIRY_NOTICE:
        return
    data = {"holder": "key", "name": key, "expires": instant_of(expires)}
    text = f"Key {_code(key)} expires at {instant_of(expires)}. After that, requests with it are refused."
    for rule in rules:
        if "key" in rule.holders:
            yield Notice(_id(rule.name, "key.expires", key, expires), rule.name, "key.expires", f"key {key}", text, data, expires)


def expiry_of(key: Key) -> float | None:
    """Return when the last secret of a key expires, in seconds since the epoch; None if it does not expire, or is revoked.

    ``key_list.expiry`` does the same for a key of the configuration, and a test compares them.
    """
    return None if key.revoked else last_expiry(key.expires, [key.digest_expiries.get(digest) for digest in key.digests])


def trial_notice(rule: NoticeRule, number: str, wall: float) -> Notice:
    """Return a notice that only tests a receiver. ``number`` makes its ID unique."""
    text = f"This is a test notice of vllm-gateway for {_code(rule.name)}."
    return Notice(_id(rule.name, "test", number), rule.name, "test", "", text, {}, wall + _TEST_SECONDS)


def _id(*about: object) -> str:
    return f"notice_{sha256(msgspec.json.encode(about)).hexdigest()[:32]}"


def _percent(share: float) -> str:
    return f"{share * 100:.6g}%"


def _code(name: str) -> str:
    """Write a name as code, in Markdown and in Slack's variant of Markdown."""
    shown = name.replace("`", "'")[:_SHOWN_NAME]
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        shown = shown.replace(character, entity)
    return f"`{shown}`"
