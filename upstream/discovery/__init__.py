"""Discovery of servers, by the EndpointSlices of a Kubernetes service or by a DNS name.

It runs in the control process and never touches a client's bytes. It must not remove a server because a source fails: the last endpoints
stay until other endpoints are found, and probes decide whether a server is reachable.
Start with ``endpoints``, then ``sources``.
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
