"""The observations of control: discovered servers, the state and the load of all servers, and the JWKS of identity providers.

The package reads and reports; it starts, stops and replaces nothing, and only ``gateway.control`` acts on the results.
Start with ``server_observer``, then ``monitor``, which collects the state of all dependencies.
"""
