"""The properties of a key that a worker reads as the operator has written them.

The rule: a property is declared here once, as a field. These are derived from the field: the setting of a key in the configuration, its
reference, the chart's schema, and the key in the snapshot. With an ``option``, the option of ``keys new`` and the column of ``keys list``
are derived too. If a worker needs a property in another form, such as an expiry in seconds, or under another name, the property is declared
in ``config/models`` and in ``snapshot``, and ``fleet/snapshot_builder`` converts it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from upstream.settings import setting

Name = str
"""An ID or an alias. The configuration reads it as ``Name`` of ``config/values``, which has no spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyProperties:
    """The properties, each with a default. ``option``: metavar and help of its option."""

    revoked: bool = setting("refuse its keys", default=False)
    anonymous: bool = setting("use this entry for requests without a key", default=False)
    team: Name | None = setting("team of the principal", option={"metavar": "ID", "help": "The team it belongs to."})
    labels: dict[Name, str] = setting('labels for its usage records, e.g. {cost_center: "17"}', make=dict)


PROPERTIES = tuple(each.name for each in fields(KeyProperties))
"""The names of all properties."""
OPTIONS: dict[str, dict[str, Any]] = {each.name: each.metadata["option"] for each in fields(KeyProperties) if "option" in each.metadata}
"""The properties that ``keys new`` sets and ``keys list`` shows, with metavar and help of the option."""
