"""Limits that several gateways count together in a Redis or Valkey: the connection, its protocol, and the scripts that decide there.

The scripts repeat the decisions of ``gateway.limits.decision`` and ``gateway.limits.windows`` in Lua; a change in one needs the same change
in the other, and only ``gateway.limits.limiter`` opens a store.
Start with ``store`` and ``connection``, then ``admit.lua`` and ``settle.lua``; ``leases`` spares the requests of busy keys their calls.
"""
