"""Rules that hold for every balance policy."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import Model, schema
from tests.upstream.balancing.policies.servers import FakeServer, candidates
from upstream.balancing.policies import DEFAULT, POLICIES
from upstream.balancing.policies.policy import NO_FACTS, RequestFacts

SERVERS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("balance", POLICIES)
@settings(deadline=None)
@given(known=SERVERS, down=st.integers(0, 3), keys=st.lists(st.none() | st.integers(0, 2**32 - 1), min_size=1, max_size=9))
def test_a_policy_chooses_a_candidate(balance: str, known: list[tuple[float, int]], down: int, keys: list[int | None]) -> None:
    servers = [FakeServer(f"s{number}", weight, in_flight) for number, (weight, in_flight) in enumerate(known)]
    policy, available = POLICIES[balance](servers), servers[down:] or servers
    for offset, key in enumerate(keys):
        assert policy.choose(candidates(available, offset), RequestFacts(key)) in available


@pytest.mark.parametrize("balance", [name for name, policy in POLICIES.items() if policy.uses_idle_pool_evenly])
@settings(deadline=None)
@given(count=st.integers(1, 6), first=st.integers(0, 1000))
def test_an_idle_pool_is_used_evenly(balance: str, count: int, first: int) -> None:
    servers = [FakeServer(f"s{number}") for number in range(count)]
    policy = POLICIES[balance](servers)
    assert {policy.choose(candidates(servers, first + number), NO_FACTS) for number in range(count)} == set(servers)


def test_the_configuration_takes_the_policies_of_the_table() -> None:
    balance = schema()["$defs"]["Model"]["properties"]["balance"]
    assert (balance["enum"], balance["default"]) == (list(POLICIES), DEFAULT)


@pytest.mark.parametrize("balance", POLICIES)
def test_the_settings_of_a_policy_are_those_of_its_section(balance: str) -> None:
    """Each setting has a default and a description."""
    policy = POLICIES[balance]
    model = {"id": "m", "servers": [{"url": "http://127.0.0.1:1"}], "balance": balance}
    if not fields(policy.settings):
        assert f"{balance}_policy" not in Model.model_fields
        return
    assert policy.settings(**Model.model_validate({**model, f"{balance}_policy": {}}).policy) == policy.settings()
    section = schema()["$defs"]["Model"]["properties"][f"{balance}_policy"]["anyOf"][0]["$ref"].rpartition("/")[2]
    settings = schema()["$defs"][section]["properties"]
    assert list(settings) == [each.name for each in fields(policy.settings)]
    assert all(each["description"] for each in settings.values())
