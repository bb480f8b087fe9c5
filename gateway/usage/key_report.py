"""Report a key's own use: its rows, without other keys, teams and servers.

The rule: the key comes from the request's authentication, never from its parameters. The entry of an identity provider's tokens does
not include their subjects here, because each subject is a separate principal.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import msgspec
from sqlalchemy import Engine

from gateway.snapshot.link import UsageRequested
from gateway.usage.errors import QueryError, check_parameters
from gateway.usage.queries import UsageQuery, parse_query, run_query

OWN_DIMENSIONS = ("model", "day", "endpoint", "code")
"""Dimensions by which a key's own use may be grouped."""


def parse_own_query(request: UsageRequested, now: datetime) -> UsageQuery:
    """Parse the query of a key for its own use, by default by model for the last 30 days. Raises QueryError."""
    check_parameters(request.parameters, ("by", "since", "until", "model"))
    query = parse_query({"by": "model", **request.parameters}, now)
    for dimension in query.by:
        if dimension not in OWN_DIMENSIONS:
            raise QueryError(f"your usage is not shown by {dimension}: choose from {', '.join(OWN_DIMENSIONS)}")
    return replace(query, key=request.key, with_subjects=False)


def own_usage(engine: Engine, query: UsageQuery, seconds: float) -> bytes:
    """Return the report as JSON. ``seconds`` is the maximum duration of the query. Raises DatabaseUnavailableError."""
    report = run_query(engine, query, seconds)
    return msgspec.json.encode({"key": query.key, **report.document()})
