"""The configuration: one YAML file, checked as a whole before it is used.

``load`` returns a frozen ``Config`` or raises one ``ConfigurationError`` that holds every problem with its file,
line and path. Nothing outside this package reads YAML.
"""

from __future__ import annotations

from typing import Any

from gateway.config.load import drafted, load
from gateway.config.models import (
    Config,
    Discover,
    HolderKind,
    Jwt,
    Key,
    Launch,
    Ledger,
    Limits,
    Model,
    ModelLimits,
    NoticeRule,
    PerUser,
    PrefixCacheIsolation,
    Price,
    Queue,
    Record,
    SelfService,
    Server,
    ServerSection,
    SignIn,
    SignInIssuer,
    Slo,
    Smtp,
    Team,
    plain_variables,
)
from gateway.config.problems import ConfigurationError, Note, Problem

__all__ = [
    "Config", "ConfigurationError", "Discover", "HolderKind", "Jwt", "Key", "Launch", "Ledger", "Limits", "Model", "ModelLimits", "Note",
    "NoticeRule", "PerUser", "PrefixCacheIsolation", "Price", "Problem", "Queue", "Record", "SelfService", "Server", "ServerSection",
    "SignIn", "SignInIssuer", "Slo", "Smtp", "Team", "drafted", "load", "plain_variables", "schema",
]  # fmt: skip


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the YAML, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
