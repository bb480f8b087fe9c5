"""Messages for the operator from pydantic's validation errors.

A message names the error and the expected value. It repeats numbers and short words of the file, never text that could be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.config.problems import Finding, Path, did_you_mean

_KINDS = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "nothing"}
_SHORT_TEXT = re.compile(r"[A-Za-z0-9._-]{1,16}")


def findings(error: ValidationError, model: type[BaseModel]) -> Iterator[Finding]:
    """Yield a finding for each error. ``error`` was raised by validating against ``model``."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # pydantic counts only the valid entries, and the invalid ones are reported
        path = tuple(part for part in detail["loc"] if part != "[key]")
        yield Finding(path, _message(detail, path, model))


def _message(detail: ErrorDetails, path: Path, model: type[BaseModel]) -> str:
    explain = _MESSAGES.get(detail["type"])
    if explain is not None:
        return explain(detail, path, model)
    wanted = _WANTED.get(detail["type"])
    if wanted is None:
        return detail["msg"]
    return f"expected {wanted.format(**detail.get('ctx', {}))}, found {_found(detail['input'])}{_quoting(detail)}"


def _found(value: object) -> str:
    if value == "":
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) or (isinstance(value, str) and _SHORT_TEXT.fullmatch(value) and not value.startswith("sk-")):
        return repr(value)
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _quoting(detail: ErrorDetails) -> str:
    value = detail["input"]
    if detail["type"] == "string_type" and not isinstance(value, dict | list | None):
        return "; write it in quotes"
    if detail["type"] in ("int_type", "float_type") and isinstance(value, str) and re.fullmatch(r"[0-9.]+", value):
        return "; write it without quotes"
    return ""


def _raised_message(detail: ErrorDetails, _path: Path, _model: type[BaseModel]) -> str:
    return str(detail["ctx"]["error"])


def _missing(_detail: ErrorDetails, path: Path, model: type[BaseModel]) -> str:
    field = _fields(path[:-1], model).get(str(path[-1]))
    return f"is missing: {field.description}" if field and field.description else "is missing"


def _unknown(_detail: ErrorDetails, path: Path, model: type[BaseModel]) -> str:
    renamed = _RENAMED.get(path)
    if renamed is not None:
        return f"this setting was renamed; write `{renamed}`"
    known = list(_fields(path[:-1], model))
    return "unknown key" + (did_you_mean(str(path[-1]), known) or f"; known here: {', '.join(known)}")


def _no_choice(detail: ErrorDetails, _path: Path, _model: type[BaseModel]) -> str:
    expected = detail["ctx"]["expected"].replace("'", "`")
    hint = did_you_mean(detail["input"], re.findall("`(.*?)`", expected)) if isinstance(detail["input"], str) else ""
    return f"expected {expected}{hint}"


_MESSAGES: dict[str, Callable[[ErrorDetails, Path, type[BaseModel]], str]] = {
    "value_error": _raised_message,
    "missing": _missing,
    "extra_forbidden": _unknown,
    "literal_error": _no_choice,
}
_RENAMED: dict[Path, str] = {("server", "relays"): "workers"}
"""Names of settings in earlier versions, by path, and the names that replace them."""

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "too_short": "at least {min_length} entry",
    "string_too_short": "some text",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a name such as HF_HOME",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
}


def _fields(path: Path, model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of the section at ``path`` below ``model``, by their YAML names."""
    here: type[BaseModel] | None = model
    for part in path:
        if here is not None and isinstance(part, str):
            field = _by_name(here).get(part)
            here = _section_in(field.annotation) if field else None
    return _by_name(here) if here else {}


def _by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section type of a field: direct, optional, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)
