"""The endpoints of EndpointSlices in all their forms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.kubernetes_api import endpoint, slice_of
from upstream.discovery.endpoints import Endpoint, EndpointState, Observation, observed
from upstream.http.address import Address

READY, UNREADY, TERMINATING = EndpointState.READY, EndpointState.UNREADY, EndpointState.TERMINATING
HTTP = ("http", 8000)


def seen(*slices: dict[str, Any], port: int | str | None = None) -> Observation:
    return observed(slices, port)


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, READY),
        ({"ready": True}, READY),
        ({"ready": None}, READY),
        ({"ready": False}, UNREADY),
        ({"ready": False, "serving": True, "terminating": True}, TERMINATING),
        ({"ready": False, "serving": False, "terminating": True}, TERMINATING),
        ({"ready": True, "serving": True, "terminating": True}, TERMINATING),
        ({"ready": True, "terminating": False}, READY),
        (None, READY),
    ],
)
def test_conditions(conditions: dict[str, Any] | None, state: EndpointState) -> None:
    entry = {"addresses": ["10.0.0.1"], "conditions": conditions}
    assert seen(slice_of("a", [entry], HTTP)).endpoints == (Endpoint("10.0.0.1", 8000, state),)


def test_all_slices_of_a_service_together_and_each_endpoint_once() -> None:
    one = slice_of("a", [endpoint("10.0.0.2"), endpoint("10.0.0.1", ready=False)], HTTP)
    two = slice_of("b", [endpoint("10.0.0.1"), endpoint("10.0.0.3", terminating=True)], HTTP)
    expected = (Endpoint("10.0.0.1", 8000), Endpoint("10.0.0.2", 8000), Endpoint("10.0.0.3", 8000, TERMINATING))
    assert seen(one, two).endpoints == expected == seen(two, one).endpoints


def test_a_pod_with_addresses_of_both_families_is_one_server() -> None:
    six = slice_of("a6", [endpoint("fd00::1", pod="p1"), endpoint("fd00::2", pod="p2")], HTTP, family="IPv6")
    four = slice_of("b4", [endpoint("10.0.0.1", pod="p1")], HTTP)
    assert seen(six, four).endpoints == (Endpoint("10.0.0.1", 8000), Endpoint("fd00::2", 8000))


def test_an_address_of_version_6_makes_a_url() -> None:
    url = Endpoint("fd00::1", 8000).url
    assert url == "http://[fd00::1]:8000"
    assert Address.parse(url) == Address("fd00::1", 8000)


def test_ports() -> None:
    both = slice_of("a", [endpoint("10.0.0.1")], HTTP, ("metrics", 9000))
    assert seen(both, port="http").endpoints[0].port == 8000
    assert seen(both, port=9000).endpoints[0].port == 9000
    assert seen(both) == Observation((), "say which port in `port`; the endpoints have 8000 (http), 9000 (metrics)")
    assert seen(both, port="web") == Observation((), "there is no port web; the endpoints have 8000 (http), 9000 (metrics)")
    assert seen(slice_of("a", [endpoint("10.0.0.1")])) == Observation((), "say which port in `port`; the endpoints have none")
    other = slice_of("b", [endpoint("10.0.0.2")], ("http", 8001))
    assert [each.port for each in seen(both, other, port="http").endpoints] == [8000, 8001], "a name has its number in each slice"
    datagrams = slice_of("a", [endpoint("10.0.0.1")], HTTP)
    datagrams["ports"].append({"name": "quic", "port": 8443, "protocol": "UDP"})
    assert seen(datagrams).endpoints == (Endpoint("10.0.0.1", 8000),)


def test_what_is_no_address_is_left_out() -> None:
    names = slice_of("a", [endpoint("example.com"), endpoint("10.0.0.1/x"), endpoint("10.0.0.1")], HTTP, family="FQDN")
    assert seen(names).endpoints == (Endpoint("10.0.0.1", 8000),)


def test_slices_with_nothing_in_them() -> None:
    nothing = slice_of("a", [{"addresses": []}], HTTP)
    none = slice_of("b", [], HTTP) | {"endpoints": None, "ports": [{"name": "http", "port": 8000}]}
    assert seen(nothing, none) == Observation(())


@pytest.mark.parametrize("port", [None, 8000, "http"])
@pytest.mark.parametrize("empty", [None, []])
def test_the_slice_that_a_service_without_pods_has_is_no_problem(port: int | str | None, empty: list[Any] | None) -> None:
    """Kubernetes' controller creates a placeholder slice, without endpoints and ports."""
    empty_slice = slice_of("a", []) | {"endpoints": empty, "ports": empty}
    assert seen(empty_slice, port=port) == Observation(())
    assert seen(empty_slice, slice_of("b", [endpoint("10.0.0.1")], HTTP), port=port) == Observation((Endpoint("10.0.0.1", 8000),))
