"""Report a key's own use, that of a person's keys, and that of a team to its owner: without other keys, teams and servers.

The rule: whose rows are read comes from the request's authentication, never from its parameters. The entry of an identity provider's tokens
does not include their subjects here, because each subject is a separate principal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    return replace(_parsed({"by": "model", **request.parameters}, OWN_DIMENSIONS, now), key=request.key)


def parse_person_query(parameters: Mapping[str, str], keys: Collection[str], now: datetime) -> UsageQuery:
    """Parse the query for the use of a person's ``keys``, by default by key for the last 30 days. Raises QueryError."""
    check_parameters(parameters, ("by", "since", "until", "model", "key"))
    return replace(_parsed({"by": "key", **parameters}, ("key", *OWN_DIMENSIONS), now), keys=tuple(keys))


def parse_team_query(parameters: Mapping[str, str], team: str, now: datetime) -> UsageQuery:
    """Parse the query of an owner for the use of a team, by default by key for the last 30 days. Raises QueryError."""
    check_parameters(parameters, ("by", "since", "until", "model", "key"))
    return replace(_parsed({"by": "key", **parameters}, ("key", *OWN_DIMENSIONS), now), team=team)


def _parsed(parameters: Mapping[str, str], dimensions: Collection[str], now: datetime) -> UsageQuery:
    query = parse_query(parameters, now)
    for dimension in query.by:
        if dimension not in dimensions:
            raise QueryError(f"your usage is not shown by {dimension}: choose from {', '.join(dimensions)}")
    return replace(query, with_subjects=False)


def own_usage(engine: Engine, query: UsageQuery, seconds: float) -> bytes:
    """Return the report as JSON. ``seconds`` is the maximum duration of the query. Raises DatabaseUnavailableError."""
    return msgspec.json.encode({"key": query.key, **run_query(engine, query, seconds).document()})
