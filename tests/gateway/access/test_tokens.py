"""Admin tokens: which one a header presents."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.access.actor import Role
from gateway.access.tokens import Token, digest_of, presented_token

NOW = datetime(2027, 1, 1, tzinfo=UTC)
CI = Token("ci", digest_of(b"secret-of-ci"), Role.OPERATOR)
OLD = Token("old", digest_of(b"secret-of-old"), Role.ADMIN, NOW)


@pytest.mark.parametrize("authorization", [b"Bearer secret-of-ci", b"bearer secret-of-ci", b"Bearer  secret-of-ci "])
def test_a_token_is_found(authorization: bytes) -> None:
    assert presented_token(authorization, (OLD, CI)) is CI


@pytest.mark.parametrize(
    "authorization",
    [b"", b"Bearer", b"Bearer ", b"secret-of-ci", b"Basic secret-of-ci", b"Bearer secret-of-c", b"Bearer secret-of-ci,", b"Bearer \xff"],
)
def test_other_headers_present_none(authorization: bytes) -> None:
    assert presented_token(authorization, (OLD, CI)) is None
    assert presented_token(authorization, ()) is None


def test_a_token_expires_at_its_time() -> None:
    assert presented_token(b"Bearer secret-of-old", (CI, OLD)) is OLD
    assert (OLD.has_expired(NOW), OLD.has_expired(NOW.replace(year=2026)), CI.has_expired(NOW)) == (True, False, False)
    assert (CI.actor.kind, CI.actor.name, CI.actor.role, CI.actor.teams) == ("token", "ci", Role.OPERATOR, frozenset())
