"""Endpoints, and what EndpointSlices say of them (Kubernetes API, ``discovery.k8s.io/v1``). Pure.

The rule: a service's endpoints are those of all its slices together. One that is in several slices, as it may be while
Kubernetes moves it, counts once, and so does a pod that has an address of each family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Any


class EndpointState(StrEnum):
    """What is said of an endpoint: it may get requests, not yet, or no more since it is about to end."""

    READY = "ready"
    UNREADY = "unready"
    TERMINATING = "leaving"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Where a server listens. ``host``: an address of either family."""

    host: str
    port: int
    state: EndpointState = EndpointState.READY

    @property
    def url(self) -> str:
        """As an operator would write it."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Observation:
    """A service at a moment: its endpoints in their order, and what about its slices is not as it should be, or nothing."""

    endpoints: tuple[Endpoint, ...] = ()
    problem: str = ""


class UnknownPortError(Exception):
    """A slice has not the port that is asked for, or several where none is; the text says so."""


class EndpointSlices:
    """The EndpointSlices of a service by name, as list and watch tell of them."""

    def __init__(self) -> None:
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, slices: Iterable[Mapping[str, Any]]) -> None:
        """These are all, as a list says."""
        self._slices = {_name(each): each for each in slices}

    def put(self, each: Mapping[str, Any]) -> None:
        """One is new, or not as it was."""
        self._slices[_name(each)] = each

    def remove(self, each: Mapping[str, Any]) -> None:
        """One is gone."""
        self._slices.pop(_name(each), None)

    def observation(self, port: int | str | None) -> Observation:
        """The endpoints with their ``port``: its number or its name, None for the only one."""
        # IPv4 first: of a pod's two addresses that is the one that every other pod can reach.
        told = (each for each in self._slices.values() if each.get("endpoints") or each.get("ports"))  # else it only holds a place
        ordered = sorted(told, key=lambda each: (str(each.get("addressType")) != "IPv4", _name(each)))
        found: dict[tuple[str, int], EndpointState] = {}
        pods: dict[str, str] = {}  # the family by which each pod is known
        problems = []
        for each in ordered:
            try:
                number = _port(each, port)
            except UnknownPortError as error:
                problems.append(str(error))
                continue
            for host, pod, standing in _endpoints(each):
                family = str(each.get("addressType"))
                if pod is None or pods.setdefault(pod, family) == family:
                    found[host, number] = min(found.get((host, number), standing), standing, key=_WORTH.index)
        return Observation(tuple(sorted(Endpoint(*place, standing) for place, standing in found.items())), "; ".join(problems[:1]))


_WORTH = (EndpointState.READY, EndpointState.UNREADY, EndpointState.TERMINATING)


def _name(each: Mapping[str, Any]) -> str:
    return str(each["metadata"]["name"])


def _endpoints(each: Mapping[str, Any]) -> Iterator[tuple[str, str | None, EndpointState]]:
    """Of each endpoint its first address, for they are all the same to clients, the pod's identity, and its standing."""
    for endpoint in each.get("endpoints") or ():
        addresses = endpoint.get("addresses")
        if addresses and _is_address(addresses[0]):
            yield str(addresses[0]), (endpoint.get("targetRef") or {}).get("uid"), _standing(endpoint.get("conditions") or {})


def _is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def _standing(conditions: Mapping[str, Any]) -> EndpointState:
    """What is not said is taken for well, as the API has it. A service may publish a pod as ready that is terminating."""
    if conditions.get("terminating"):
        return EndpointState.TERMINATING
    return EndpointState.UNREADY if conditions.get("ready") is False else EndpointState.READY


def _port(each: Mapping[str, Any], wanted: int | str | None) -> int:
    """Raises UnknownPortError. A named port may have another number in each slice."""
    ports = [port for port in each.get("ports") or () if port.get("port") and port.get("protocol", "TCP") == "TCP"]
    fitting = [port for port in ports if wanted is None or wanted in (port["port"], port.get("name"))]
    numbers = {int(port["port"]) for port in fitting}
    if len(numbers) == 1:
        return numbers.pop()
    has = ", ".join(f"{port['port']} ({port['name']})" if port.get("name") else str(port["port"]) for port in ports) or "none"
    if wanted is None:
        raise UnknownPortError(f"say which port in `port`; the endpoints have {has}")
    raise UnknownPortError(f"there is no port {wanted}; the endpoints have {has}")
