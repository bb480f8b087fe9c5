"""Pools of servers, by the names of their policies."""

from __future__ import annotations

from collections.abc import Sequence

from upstream.balancing.policies import POLICIES
from upstream.balancing.pool import Pool
from upstream.balancing.server import Server


def pool_of(servers: Sequence[Server], balance: str) -> Pool:
    """Return a pool of the servers, with the default settings of its policy."""
    return Pool(servers, POLICIES[balance](servers))
