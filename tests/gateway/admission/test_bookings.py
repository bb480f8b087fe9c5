"""Bookings: who takes one, when it expires, and which one gives way if there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.bookings import RETURN_GRACE, Booking, Bookings, service_of
from gateway.admission.fair_queue import MEMORY, FairQueue, Flow, Share
from gateway.admission.shared_bookings import SharedBookings

START = 1000.0


def unshared() -> SharedBookings:
    return SharedBookings(memoryview(bytearray(8 * 4096)).cast("d"), lambda: ())


def flows_of(*weights: float) -> list[Flow[str]]:
    queue: FairQueue[str] = FairQueue()
    return [queue.leaf([Share("team", 1.0), Share(str(number), weight)]) for number, weight in enumerate(weights)]


def booked(bookings: Bookings, leaf: Flow[str], after: float, fingerprint: int = 10, most: int = 100) -> Booking | None:
    return bookings.add(Booking(bookings.free_time(START + after), 1.0, leaf, fingerprint, START), most)


def test_the_flow_takes_its_booking_at_its_time() -> None:
    bookings, (one, other) = Bookings(unshared()), flows_of(1.0, 1.0)
    booked(bookings, one, 5.0)
    assert bookings.take(one, 10, START + 4.9) is None
    assert bookings.take(other, 10, START + 5.1) is None
    found = bookings.take(one, 10, START + 5.0)
    assert found is not None and found.at == START + 5.0 and not len(bookings) and not one.booked


def test_another_request_leaves_the_booking_to_its_client_at_first() -> None:
    bookings, (one,) = Bookings(unshared()), flows_of(1.0)
    booked(bookings, one, 5.0)
    booked(bookings, one, 5.1, fingerprint=20)
    assert bookings.take(one, 30, START + 5.2) is None
    found = bookings.take(one, 20, START + 5.2)
    assert found is not None and found.fingerprint == 20
    found = bookings.take(one, 30, START + 5.6)
    assert found is not None and found.fingerprint == 10


def test_a_booking_expires_and_keeps_its_flow_until_then() -> None:
    queue: FairQueue[str] = FairQueue()
    leaf = queue.leaf([Share("key", 1.0)])
    bookings = Bookings(unshared())
    booked(bookings, leaf, 5.0)
    assert bookings.expire(START + 5.0 + RETURN_GRACE) == [] and queue.forget(START + 2 * MEMORY) == []
    assert len(bookings.expire(START + 5.1 + RETURN_GRACE)) == 1 and bookings.take(leaf, 10, START + 8.0) is None
    assert queue.forget(START + 2 * MEMORY) == [leaf]


def test_the_latest_booking_of_the_flow_with_the_most_gives_way() -> None:
    bookings, (heavy, light) = Bookings(unshared()), flows_of(1.0, 4.0)
    for after in (1.0, 2.0, 3.0):
        assert booked(bookings, heavy, after, most=3) is None
    gone = booked(bookings, light, 9.0, most=3)
    assert gone is not None and (gone.leaf, gone.at) == (heavy, START + 3.0)
    mine = booked(bookings, heavy, 4.0, most=3)
    assert mine is not None and mine.at == START + 4.0, "it has no booking itself"
    assert (heavy.booked, light.booked) == (2, 1)


def test_service_counts_for_the_leaf_and_the_flows_above_it() -> None:
    bookings, (one, other) = Bookings(unshared()), flows_of(1.0, 1.0)
    for leaf, after in ((one, 1.0), (one, 2.0), (other, 3.0)):
        booked(bookings, leaf, after)
    service = service_of(bookings.between(START, START + 2.5))
    assert one.parent is not None
    assert (service[one], service.get(other, 0.0), service[one.parent]) == (2.0, 0.0, 2.0)


_ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "take", "expire"]), st.integers(0, 2), st.integers(0, 20), st.integers(1, 3)), max_size=60
)


@given(_ACTS)
def test_bookings_are_bounded_and_each_is_taken_once(acts: list[tuple[str, int, int, int]]) -> None:
    bookings, flows, most = Bookings(unshared()), flows_of(1.0, 1.0, 4.0), 5
    added = removed = 0
    for act, flow, after, mark in acts:
        if act == "add":
            added += 1
            removed += booked(bookings, flows[flow], after, mark, most) is not None
        elif act == "take":
            removed += bookings.take(flows[flow], mark, START + after) is not None
        else:
            removed += len(bookings.expire(START + after))
        assert len(bookings) == added - removed == sum(each.booked for each in flows) <= most
        times = [each.at for each in bookings.between(0.0, START + 100.0)]
        assert times == sorted(times)
