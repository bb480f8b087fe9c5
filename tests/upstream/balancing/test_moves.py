"""Responses leave a server that is drained or silent only for another server with a slot, and only if they can be continued."""

from __future__ import annotations

import pytest

from upstream.balancing.moves import SILENCE, SPREAD, move_responses
from upstream.balancing.pool import LiveServers
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.errors import UpstreamError

NOW = 1000.0


class Response:
    """A response that can be continued. ``reason``: why it was ended."""

    reason: str | None = None

    def fail(self, error: UpstreamError) -> None:
        assert self.reason is None, "it is ended once"
        self.reason = error.reason


def server(name: str = "other", condition: Condition = Condition.UP, model: str = "m", loads: str = "") -> Server:
    return Server(ServerSpec(name, Address(port=1), model, loads=loads), condition, clock=lambda: NOW)


def serving(count: int, condition: Condition = Condition.UP) -> tuple[Server, list[Response]]:
    responses = [Response() for _ in range(count)]
    one = server("first")
    one.movable.update(responses)
    one.condition = condition
    return one, responses


def moved(responses: list[Response]) -> int:
    return sum(response.reason is not None for response in responses)


def test_a_drained_server_keeps_its_streams_for_the_grace_and_then_moves_them_one_after_the_other() -> None:
    first, responses = serving(100, Condition.OUT_OF_ROTATION)
    move_responses(first, [first, server()], NOW + first.move_after - 0.1)
    assert moved(responses) == 0
    counts = []
    for second in range(int(SPREAD) + 1):
        move_responses(first, [first, server()], NOW + first.move_after + second)
        counts.append(moved(responses))
    assert counts[0] == 100 / SPREAD, "the other servers do not get all prompts at once"
    assert counts == sorted(counts) and counts[-1] == 100
    assert {response.reason for response in responses} == {"moved"}


def test_they_stay_if_the_other_servers_report_another_model() -> None:
    (first, responses), other = serving(3, Condition.OUT_OF_ROTATION), server()
    first.loaded, other.loaded = "/models/a, 4096 tokens", "/models/b, 4096 tokens"
    move_responses(first, [first, other], NOW + 60)
    assert moved(responses) == 0
    other.loaded = ""  # not known
    move_responses(first, [first, other], NOW + 60)
    assert moved(responses) == 3


@pytest.mark.parametrize("other", [server(model="n"), server(loads="other/weights")], ids=["name", "weights"])
def test_they_stay_if_the_other_servers_have_another_model(other: Server) -> None:
    first, responses = serving(3, Condition.OUT_OF_ROTATION)
    move_responses(first, [first, other], NOW + 60)
    assert moved(responses) == 0


@pytest.mark.parametrize("others", [[], [Condition.DOWN], [Condition.LOADING, Condition.OUT_OF_ROTATION]], ids=repr)
def test_without_another_server_they_stay(others: list[Condition]) -> None:
    first, responses = serving(3, Condition.OUT_OF_ROTATION)
    move_responses(first, [first, *(server(each.value, each) for each in others)], NOW + 60)
    assert moved(responses) == 0 and len(first.movable) == 3


def test_no_more_are_moved_than_other_servers_have_slots() -> None:
    first, responses = serving(10, Condition.OUT_OF_ROTATION)
    other = server()
    other.set_limit(4)
    other.start_exchange()
    move_responses(first, [other], NOW + 60)
    assert moved(responses) == 3
    for _ in range(3):
        other.start_exchange()
    move_responses(first, [other], NOW + 61)
    assert moved(responses) == 3


def test_a_server_that_returns_to_rotation_keeps_its_streams() -> None:
    first, responses = serving(3, Condition.OUT_OF_ROTATION)
    first.condition = Condition.UP
    move_responses(first, [server()], NOW + 60)
    assert moved(responses) == 0


@pytest.mark.parametrize(("silent", "reason"), [(SILENCE - 0.1, None), (SILENCE, "unresponsive")])
def test_streams_of_a_server_that_is_down_are_moved_once_they_are_silent(silent: float, reason: str | None) -> None:
    first, responses = serving(3, Condition.DOWN)
    first.last_byte_at = NOW
    move_responses(first, [server()], NOW + silent)
    assert {response.reason for response in responses} == {reason}


def test_a_silent_server_that_is_up_keeps_its_streams() -> None:
    first, responses = serving(3)
    move_responses(first, [server()], NOW + 60)
    assert moved(responses) == 0


def test_a_removed_server_is_drained_until_its_last_request_has_finished() -> None:
    servers = LiveServers()
    spec = ServerSpec("first", Address(port=1), "m")
    first = servers.reconcile([spec])["first"]
    first.start_exchange()
    first.movable.add(Response())
    assert servers.with_movable_responses() == [first]
    servers.reconcile([])
    servers.expire()
    assert servers.with_movable_responses() == [first]
    assert first.draining_since is not None
    first.finish_exchange()
    servers.expire()
    assert servers.with_movable_responses() == []
