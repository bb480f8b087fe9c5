"""Read the endpoints of a service from its EndpointSlices (Kubernetes API, ``discovery.k8s.io/v1``). Pure.

The rule: a service has the endpoints of all its slices. An endpoint in several slices, e.g. while Kubernetes moves it, counts once, and so
does a pod with an address of each family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Any


class EndpointState(StrEnum):
    """The state of an endpoint, the best one first: it may get requests, it may not get requests yet, or it is terminating."""

    READY = "ready"
    UNREADY = "unready"
    TERMINATING = "leaving"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """The address of a server. ``host``: of either family."""

    host: str
    port: int
    state: EndpointState = EndpointState.READY

    @property
    def url(self) -> str:
        """The URL as in the configuration."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Observation:
    """The observed state of a service: its sorted endpoints, and a problem with its slices, or an empty text."""

    endpoints: tuple[Endpoint, ...] = ()
    problem: str = ""


class UnknownPortError(Exception):
    """A slice lacks the configured port, or has several ports although no port is configured. The text names the problem."""


def observed(slices: Iterable[Mapping[str, Any]], port: int | str | None) -> Observation:
    """Return the endpoints of a service's slices with ``port``: its number or its name, or None for the only port."""
    # IPv4 first: every other pod can reach this address of a pod with two.
    filled = (each for each in slices if each.get("endpoints") or each.get("ports"))  # others are placeholders
    ordered = sorted(filled, key=lambda each: (str(each.get("addressType")) != "IPv4", name_of(each)))
    found: dict[tuple[str, int], EndpointState] = {}
    pods: dict[str, str] = {}  # the address family of each pod's endpoint
    problems = []
    for each in ordered:
        try:
            number = _port(each, port)
        except UnknownPortError as error:
            problems.append(str(error))
            continue
        for host, pod, state in _endpoints(each):
            family = str(each.get("addressType"))
            if pod is None or pods.setdefault(pod, family) == family:
                found[host, number] = min(found.get((host, number), state), state, key=[*EndpointState].index)
    return Observation(tuple(sorted(Endpoint(*address, state) for address, state in found.items())), "; ".join(problems[:1]))


def name_of(each: Mapping[str, Any]) -> str:
    """Return the name of a slice."""
    return str(each["metadata"]["name"])


def _endpoints(each: Mapping[str, Any]) -> Iterator[tuple[str, str | None, EndpointState]]:
    """Yield the first address of each endpoint (all are equivalent for clients), the pod's identity, and the state."""
    for endpoint in each.get("endpoints") or ():
        addresses = endpoint.get("addresses")
        if addresses and _is_address(addresses[0]):
            yield str(addresses[0]), (endpoint.get("targetRef") or {}).get("uid"), _state(endpoint.get("conditions") or {})


def _is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def _state(conditions: Mapping[str, Any]) -> EndpointState:
    """Return the state. A missing condition counts as true, as the API specifies. A terminating pod may be published as ready."""
    if conditions.get("terminating"):
        return EndpointState.TERMINATING
    return EndpointState.UNREADY if conditions.get("ready") is False else EndpointState.READY


def _port(each: Mapping[str, Any], wanted: int | str | None) -> int:
    """Return the number of a port, which may differ from slice to slice if the port is named. Raises UnknownPortError."""
    ports = [port for port in each.get("ports") or () if port.get("port") and port.get("protocol", "TCP") == "TCP"]
    fitting = [port for port in ports if wanted is None or wanted in (port["port"], port.get("name"))]
    numbers = {int(port["port"]) for port in fitting}
    if len(numbers) == 1:
        return numbers.pop()
    has = ", ".join(f"{port['port']} ({port['name']})" if port.get("name") else str(port["port"]) for port in ports) or "none"
    if wanted is None:
        raise UnknownPortError(f"say which port in `port`; the endpoints have {has}")
    raise UnknownPortError(f"there is no port {wanted}; the endpoints have {has}")
