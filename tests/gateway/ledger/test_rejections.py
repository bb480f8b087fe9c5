"""Requests without a valid key: no client can fill the memory, or displace the requests of others."""

from __future__ import annotations

from gateway.ledger.rejections import RecentRejections, RejectionSample
from gateway.snapshot.link import RejectedRequests
from gateway.telemetry.request_record import RequestRecord

_MANY = 20_000


def rejected(number: int, client: str | None, detail: str | None = None) -> RequestRecord:
    record = RequestRecord(f"req_{number}", 1.0 + number, "/v1/chat/completions", 401, code="invalid_api_key", detail=detail)
    record.client = client
    return record


def reported(sample: RejectionSample) -> list[RejectedRequests]:
    sent: list[RejectedRequests] = []
    sample.report = sent.append
    sample.flush()
    return sent


def test_what_is_known_of_a_request_is_reported() -> None:
    sample = RejectionSample()
    assert reported(sample) == []
    sample.add(rejected(1, "10.0.0.7", detail="x" * 1000))
    ((message),) = reported(sample)
    (request,) = message.requests
    assert (request.id, request.started, request.client, request.code, request.detail) == (
        "req_1",
        2.0,
        "10.0.0.7",
        "invalid_api_key",
        "x" * 256,
    )
    assert reported(sample) == [], "once"


def test_a_client_that_sends_many_displaces_no_other() -> None:
    sample, recent = RejectionSample(), RecentRejections()
    for number in range(_MANY):
        sample.add(rejected(number, "10.0.0.7"))
    sample.add(rejected(_MANY, "10.0.0.8"))
    (message,) = reported(sample)
    recent.add(message)
    for number in range(1000):
        for each in range(4):
            sample.add(rejected(number * 4 + each, "10.0.0.7"))
        recent.add(*reported(sample))
    known = [*recent]
    assert [each.id for each in known if each.client == "10.0.0.8"] == [f"req_{_MANY}"]
    assert len(known) == 21 and recent.omitted == _MANY - 4


def test_many_clients_have_a_bound() -> None:
    sample, recent = RejectionSample(), RecentRejections()
    for number in range(_MANY):
        sample.add(rejected(number, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
        if number % 10 == 0:
            recent.add(*reported(sample))
    assert len([*recent]) == 500
    assert max(each.started for each in recent) >= _MANY - 10, "the last ones stay"


def test_a_client_cannot_choose_many_addresses_of_its_network() -> None:
    recent = RecentRejections()
    for number in range(1000):
        sample = RejectionSample()
        sample.add(rejected(number, f"2001:db8::{number:x}"))
        recent.add(*reported(sample))
    assert len([*recent]) == 20
    sample.add(rejected(1, None))
    recent.add(*reported(sample))
    assert len([*recent]) == 21
