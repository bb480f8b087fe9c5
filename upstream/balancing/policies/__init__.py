"""Balance policies: they decide which available server of a pool gets a request.

Each policy is a class in a separate module, with its description, its settings and the facts of a request that it requires. It must not
change a server, and it sees only servers that are up and have capacity. Start with ``policy``.

To add a policy, write its module and its test, and add a line to the table below. Allowed values, the section with its settings, schema
and documents are derived from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upstream.balancing.policies.cost import Cost
from upstream.balancing.policies.least_busy import LeastBusy
from upstream.balancing.policies.policy import Policy
from upstream.balancing.policies.prefix import Prefix
from upstream.balancing.policies.round_robin import RoundRobin

POLICIES: Mapping[str, type[Policy[Any]]] = {
    "least_busy": LeastBusy,
    "round_robin": RoundRobin,
    "prefix": Prefix,
    "cost": Cost,
}
"""All policies by their name in the setting ``balance``."""

DEFAULT = "least_busy"
