"""Messages for the operator from pydantic's validation errors.

A message names the error and the expected value. It repeats numbers and short words of the file, never text that could be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gateway.config.problems import Finding, Path, did_you_mean, similar, unexpanded
from upstream.vllm import known_names

_KINDS = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number", type(None): "nothing"}
_SHORT_TEXT = re.compile(r"[A-Za-z0-9._,*-]{1,16}")
_SHORT_TEXTS = re.compile(rf"(?!(?:.* )?sk-){_SHORT_TEXT.pattern}(?: {_SHORT_TEXT.pattern}){{0,5}}")
_LISTED_SECTIONS = 3
_UNKNOWN = "unknown key"
_SIMILAR, _NEARLY_EQUAL = 0.8, 0.85


def findings(error: ValidationError, model: type[BaseModel]) -> Iterator[Finding]:
    """Yield a finding for each error. ``error`` was raised by validating against ``model``."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # pydantic counts only the valid entries, and the invalid ones are reported
        path = tuple(part for part in detail["loc"] if part != "[key]")
        yield Finding(path, _message(detail, path, model))


def _message(detail: ErrorDetails, path: Path, model: type[BaseModel]) -> str:
    if isinstance(detail["input"], str) and (hint := unexpanded(detail["input"])):
        return hint
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "missing":
            return _missing(path, model)
        case "extra_forbidden":
            return _unknown(path, model)
        case "literal_error" | "enum":
            return _no_choice(detail)
    if (wanted := _WANTED.get(detail["type"])) is None:
        return detail["msg"]
    return f"expected {wanted.format(**detail.get('ctx', {}))}, found {_found(detail['input'])}{_hint(detail, path, model)}"


def _found(value: object) -> str:
    if value == "":
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) or (isinstance(value, str) and _SHORT_TEXT.fullmatch(value) and not value.startswith("sk-")):
        return repr(value)
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def _hint(detail: ErrorDetails, path: Path, model: type[BaseModel]) -> str:
    """Return how to write a value of the wrong type."""
    value, kind = detail["input"], detail["type"]
    if kind == "string_type" and not isinstance(value, dict | list | None):
        return "; write it in quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return _number_hint(value)
    if kind == "model_type" and (named := [name for name, field in _fields(path, model).items() if field.is_required()]):
        return f"; write {{{', '.join(f'{name}: …' for name in named)}}}"
    if kind in ("model_type", "tuple_type", "dict_type"):
        field = _field_at(path, model)
        about = field.description if field is not None and field.description else ""
        shown = value if isinstance(value, str) else _found(value)
        is_list = kind == "tuple_type" and "e.g. [" not in about and _SHORT_TEXTS.fullmatch(shown)
        return f"; write [{', '.join(shown.split())}]" if is_list else f"; {about}"
    return ""


def _number_hint(text: str) -> str:
    plain = text.replace(",", "").replace(" ", "")
    if re.fullmatch(r"[0-9.]+", text):
        return "; write it without quotes"
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?([eE]\+?[0-9]{1,2})?", plain):
        return f"; write {float(plain):.15g}" if float(plain) < 1e15 else ""
    return ""


def _missing(path: Path, model: type[BaseModel]) -> str:
    field = _field_at(path, model)
    return f"is missing: {field.description}" if field and field.description else "is missing"


def _unknown(path: Path, model: type[BaseModel]) -> str:
    """Name what was probably meant: a renamed setting, a similar one, one of another product, or the section to which it belongs."""
    name = str(path[-1])
    if renamed := _RENAMED.get(path):
        return f"this setting was renamed; write `{renamed}`"
    known = _fields(path[:-1], model)
    section, _, rest = name.partition(".")
    if rest and section in known:
        return f"{_UNKNOWN}; write `{section}: {{{rest}: …}}`"
    if name in _OF_OTHERS and similar(name, known, _NEARLY_EQUAL) is None:
        return f"{_UNKNOWN}; {_OF_OTHERS[name]}"
    near = did_you_mean(name, known)
    if similar(name, known, _SIMILAR) is not None:
        return f"{_UNKNOWN}{near}"
    sections = [f"`{section}`" if section else "the top level of the file" for section in _sections_with(model, name)]
    if any(part in ("models", "launch") for part in path) and known_names.built_in().knows(name.replace("_", "-")):
        sections = ["`models[].launch.args`", *sections]
    if sections:
        return f"{_UNKNOWN}; it belongs in {' or '.join(sections[:_LISTED_SECTIONS])}"
    return f"{_UNKNOWN}{near}" if near else f"{_UNKNOWN}; known here: {', '.join(known)}"


def misspelled(finding: Finding) -> str | None:
    """Return the setting that was probably meant by an unknown key, None if the finding is another one."""
    found = re.fullmatch(f"{_UNKNOWN}; did you mean `(.*)`.", finding.message)
    return found[1] if found else None


def _sections_with(model: type[BaseModel], name: str, path: str = "") -> Iterator[str]:
    """Yield the paths of all sections that have a setting of this name."""
    fields = _by_name(model)
    if name in fields:
        yield path
    for key, field in fields.items():
        if (section := _section_in(field.annotation)) is not None:
            repeated = "[]" if "tuple" in str(field.annotation) else ""
            yield from _sections_with(section, name, f"{path}.{key}{repeated}".removeprefix("."))


def _no_choice(detail: ErrorDetails) -> str:
    expected = detail["ctx"]["expected"].replace("'", "`").replace("False", "`false`")
    hint = did_you_mean(detail["input"], re.findall("`(.*?)`", expected)) if isinstance(detail["input"], str) else ""
    return f"expected {expected}{hint}"


_RENAMED: dict[Path, str] = {("server", "relays"): "workers"}
"""Names of settings in earlier versions, by path, and the names that replace them."""

_OF_OTHERS: dict[str, str] = {
    **dict.fromkeys(("rpm", "rpm_limit", "requests_per_min"), "write `limits: {requests_per_minute: …}`"),
    **dict.fromkeys(("tpm", "tpm_limit", "tokens_per_min"), "write `limits: {tokens_per_minute: …}`"),
    **dict.fromkeys(("max_parallel_requests", "max_concurrent"), "write `limits: {concurrent: …}`"),
    **dict.fromkeys(
        ("tokens_per_hour", "tokens_per_year"), "write `budgets: [{window: 1h, tokens: …}]` in `limits`, with the length of the window"
    ),
    **dict.fromkeys(
        ("cost_per_hour", "cost_per_year"), "write `budgets: [{window: 1h, cost: …}]` in `limits`, with the length of the window"
    ),
    **dict.fromkeys(
        ("requests_per_hour", "requests_per_day"), "requests are limited by `requests_per_minute`, and tokens or cost by longer windows"
    ),
    **dict.fromkeys(("max_budget", "budget"), "write `limits: {cost_per_month: …}`, or `limits: {budgets: …}` for other windows"),
    **dict.fromkeys(("api_base", "base_url", "upstream", "endpoint_url"), "write `servers: [{url: …}]` for a server that runs already"),
    **dict.fromkeys(("model_name", "served_model_name"), "write `id` for the name that clients use, and `aliases` for further names"),
    **dict.fromkeys(("master_key", "api_keys"), "write `keys`; `vllm-gateway keys new` creates one"),
    "key": "write `hash` with the output of `vllm-gateway keys hash`; the key itself is not stored",
    "model_list": "write `models`",
    "litellm_params": "write `servers: [{url: …}]` for a server that runs already, or `launch` for one to start",
    "database_url": "write `ledger`",
    "redis_url": "write `limits_store`",
}
"""Settings of other gateways, and settings that do not exist, with what to write in their section."""

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
    fields = _by_name(model)
    for part in path:
        if isinstance(part, str):
            section = _section_in(fields[part].annotation) if part in fields else None
            fields = _by_name(section) if section else {}
    return fields


def _field_at(path: Path, model: type[BaseModel]) -> FieldInfo | None:
    """Return the field of the setting at ``path``, or of the list that contains it."""
    names = [part for part in path if isinstance(part, str)]
    return _fields(tuple(names[:-1]), model).get(names[-1]) if names else None


def _by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section type of a field: direct, optional, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)
