"""The configuration: one YAML file, checked as a whole before it is used.

``load`` returns a frozen ``Config`` or raises one ``ConfigurationError`` that holds every problem with its file,
line and path. Nothing outside this package reads YAML.
"""

from __future__ import annotations

from typing import Any

from gateway.config.load import drafted, load
from gateway.config.models import (
    Admin,
    Body,
    Config,
    Cors,
    Discover,
    Dns,
    Group,
    Jwt,
    Key,
    Kubernetes,
    Launch,
    Ledger,
    Limits,
    LimitsSection,
    Log,
    Lora,
    Mirror,
    Model,
    ModelLimits,
    PrefixCacheIsolation,
    Price,
    Queue,
    Server,
    ServerSection,
    Team,
    Timeouts,
    Tls,
    Tracing,
    matches,
    plain_variables,
)
from gateway.config.problems import ConfigurationError, Note, Problem

__all__ = [
    "Admin",
    "Body",
    "Config",
    "ConfigurationError",
    "Cors",
    "Discover",
    "Dns",
    "Group",
    "Jwt",
    "Key",
    "Kubernetes",
    "Launch",
    "Ledger",
    "Limits",
    "LimitsSection",
    "Log",
    "Lora",
    "Mirror",
    "Model",
    "ModelLimits",
    "Note",
    "PrefixCacheIsolation",
    "Price",
    "Problem",
    "Queue",
    "Server",
    "ServerSection",
    "Team",
    "Timeouts",
    "Tls",
    "Tracing",
    "drafted",
    "load",
    "matches",
    "plain_variables",
    "schema",
]


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the YAML, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
