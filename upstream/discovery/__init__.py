"""Servers that come and go, found by the EndpointSlices of a Kubernetes service or by a DNS name.

``endpoints`` says what an endpoint is and reads EndpointSlices, ``kubernetes`` and ``dns`` are the two ways to learn of them,
``sources`` keeps one watch for each source that is wanted. It runs in the control process; nothing here touches a client's bytes.

The rule: what was found stays until something else was found. A source that fails takes no server away; whether a server can be
reached is for its probes to say.
"""

from upstream.discovery.dns import DnsName, Resolve, system_resolver
from upstream.discovery.endpoints import Endpoint, EndpointState
from upstream.discovery.kubernetes import SERVICE_ACCOUNT, Cluster, Service
from upstream.discovery.sources import DiscoveryStatus, Source, Sources

__all__ = [
    "SERVICE_ACCOUNT",
    "Cluster",
    "DiscoveryStatus",
    "DnsName",
    "Endpoint",
    "EndpointState",
    "Resolve",
    "Service",
    "Source",
    "Sources",
    "system_resolver",
]
