"""The base of all sections, and sections whose settings are declared where they are used.

A worker has no pydantic, so the packages that it loads declare their settings as plain dataclasses: the balance policies, the properties of
keys. Each field is a ``setting`` (upstream/settings.py). The rule: the configuration reads the same annotations with its own types, so
``bool`` is strictly true or false, and ``str`` is not empty.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, Strict, create_model

from gateway.config import values


class Section(BaseModel):
    """A section of the configuration. Unknown keys are errors, and a section is immutable after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def setting(description: str, default: Any = None, **details: Any) -> Any:
    """Return a setting with a default, as ``upstream.settings.setting`` does. ``details`` are arguments of pydantic's ``Field``."""
    return Field(default=default, description=description, **details)


_TYPES = vars(values) | {"bool": values.Flag, "int": Annotated[int, Strict()], "float": Annotated[float, Strict()], "str": values.Text}
"""The types of the annotations of a declaration, by their text."""


def declared(declaration: type) -> dict[str, Any]:
    """Return the settings that a dataclass declares, as fields for ``create_model``."""
    types = get_type_hints(declaration, _TYPES, include_extras=True)
    made: dict[str, Any] = {}
    for each in fields(declaration):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        described = {key: value for key, value in each.metadata.items() if key != "option"}
        made[each.name] = types[each.name], Field(default=default, **described)
    return made


def section_of(name: str, declaration: type, about: str) -> Any:
    """Return the type of the section ``name``, whose value is the dataclass of its settings. ``about``: its description."""
    section = create_model(name.title().replace("_", ""), __base__=Section, __doc__=about, **declared(declaration))
    return Annotated[section, AfterValidator(lambda written: declaration(**written.model_dump())), PlainSerializer(asdict)]
