"""The keys with which a person may do something."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import pytest

from gateway.api.errors import ERRORS, Refusal
from gateway.auth.keys import hash_of
from gateway.config import Key
from gateway.self_service.access import Action, check_owner, grant_of, refusal_of
from gateway.store.entries import StoredKey
from gateway.store.errors import Reason, RefusedChangeError
from tests.gateway.self_service.stage import person

NOW = datetime(2027, 1, 15, tzinfo=UTC)
OWNER = person("olga", "open", owned=("lab",))
TOM = person("tom", "lab")
KEY_OF_TOM = StoredKey(Key.model_validate({"id": "k", "hash": hash_of("sk"), "team": "lab"}), None, 1, NOW, NOW, TOM.identity)


@pytest.mark.parametrize("action", get_args(Action))
def test_an_owner_sees_and_revokes_the_keys_of_others(action: Action) -> None:
    assert grant_of(TOM, action).includes(KEY_OF_TOM)
    assert grant_of(OWNER, action).includes(KEY_OF_TOM) is (action in ("show", "revoke"))
    assert not grant_of(person("eve", "lab"), action).includes(KEY_OF_TOM)


def test_only_an_owned_team_exists() -> None:
    check_owner(OWNER, "lab")
    for visitor, team in ((OWNER, "open"), (TOM, "lab"), (OWNER, "none")):
        with pytest.raises(Refusal) as refused:
            check_owner(visitor, team)
        assert refused.value.code == "not_found"


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_of_the_store_has_an_error(reason: Reason) -> None:
    refusal = refusal_of(RefusedChangeError(reason, "limits.cost_per_day: at most 5"))
    assert refusal.code in ERRORS and refusal.spec.status < 500
    assert (refusal.param == "limits.cost_per_day") is (reason is Reason.INVALID)
    assert ("at most" in refusal.message) is (reason is not Reason.NOT_FOUND)
