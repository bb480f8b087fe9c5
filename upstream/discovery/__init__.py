"""Discovery of servers, by the EndpointSlices of a Kubernetes service or by a DNS name.

It runs in the control process and never touches a client's bytes. It must not remove a server because a source fails: the last endpoints
stay until other endpoints are found, and probes decide whether a server is reachable.
Start with ``endpoints``, then ``sources``.
"""
