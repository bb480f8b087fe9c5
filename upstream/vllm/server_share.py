"""Find the part of a server's slots that this gateway may use beside other gateways, from the server's own metrics. Pure.

``next_part`` is called with a sample about once a second. The gateways exchange nothing: what a server has beyond a gateway's own
requests belongs to others. The rules:

- Without others, a gateway may use all slots.
- A gateway without queued requests may use what is free, and always a small part, so that it can start.
- Gateways with queued requests share the slots equally. While slots are free, each takes as many more as the others. While all are used,
  each gives up the same part of its slots (additive increase, multiplicative decrease).
"""

from __future__ import annotations

from dataclasses import replace

from upstream.vllm.auto_max_inflight import AutoLimit, Bounds, LoadSample

_DECREASE = 1 / 4
_INCREASE = 1 / 4  # of the free slots
_START = 1 / 8  # of all slots: for a gateway whose first requests come while others use the server


def next_part(limit: AutoLimit, sample: LoadSample, bounds: Bounds) -> AutoLimit:
    """Return the limit after another sample. ``bounds.most``: the slots of all gateways together."""
    whole, own = bounds.most, sample.in_flight
    used = round(sample.engine.running + sample.engine.waiting)
    others = used - own
    if others <= 0:
        return replace(limit, value=whole, reason="no other gateway uses the server")
    reason = f"others have {others} of the {whole} slots"
    if own > limit.value:
        return replace(limit, reason=reason)  # the last decrease has no effect yet
    if not sample.queued and own < limit.value:
        value: float = max(whole - others, own, whole * _START)
    elif used < whole:
        value = limit.value + max((whole - used) * _INCREASE, 1.0)
    else:
        value = limit.value - max(limit.value * _DECREASE, 1.0)
    return replace(limit, value=bounds.clipped(value), reason=reason)
