"""The difference of two configurations as values, for an entry of the audit log. Pure.

The rule: it contains no secret. Values that the configuration reads from variables and files are masked, and so are variables and options
of launched servers whose name says that they are secret. Hashes are cut.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic_core import to_jsonable_python

from gateway.config import Config

_MASK = "***"
_MAX_PATHS = 200
_FREE = frozenset({"env", "args"})
"""Settings with names of other programs, whose secrets are known only by their names."""
_SECRET_NAMES = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY", re.IGNORECASE)
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")
_MISSING = object()


def fingerprint(config: Config) -> str:
    """Return the SHA-256 of the file with the settings and of ``keys_file``. It reveals a change that was made while no gateway ran."""
    digest = hashlib.sha256()
    for file in (*config.files[:1], *([config.keys_file] if config.keys_file else ())):
        digest.update(_content(file))
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.is_file() else b""
    except OSError:
        return b""


def differences(before: Config, after: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of each setting that differs, by its path: before and after.

    A path names an entry by its ID: ``models[chat].queue.size``. An entry that was added is missing before.
    """
    former: dict[str, Any] = {}
    latter: dict[str, Any] = {}
    for number, (path, one, other) in enumerate(_differing("", before, after)):
        if number == _MAX_PATHS:
            former["…"] = latter["…"] = f"only the first {_MAX_PATHS} settings are listed"
            break
        name = path.rpartition(".")[2]
        former |= {} if one is _MISSING else {path: shown(one, name)}
        latter |= {} if other is _MISSING else {path: shown(other, name)}
    return former, latter


def _differing(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if before == after:
        return
    if isinstance(before, BaseModel) and type(before) is type(after):
        for name, field in type(before).model_fields.items():
            yield from _differing(f"{path}.{field.alias or name}".lstrip("."), getattr(before, name), getattr(after, name))
        return
    entries = _by_name(before), _by_name(after)
    if entries[0] is None or entries[1] is None:
        yield path, before, after
        return
    for name in dict.fromkeys((*entries[0], *entries[1])):
        yield from _differing(f"{path}[{name}]", entries[0].get(name, _MISSING), entries[1].get(name, _MISSING))
    if list(entries[0]) != list(entries[1]) and sorted(entries[0]) == sorted(entries[1]):
        yield f"{path}[]", list(entries[0]), list(entries[1])


def _by_name(value: Any) -> Mapping[str, Any] | None:
    """Return the entries of a list by ID or name, None for another value."""
    if not isinstance(value, tuple) or not all(isinstance(each, BaseModel) for each in value):
        return None
    names = [str(getattr(each, "id", None) or getattr(each, "name", None) or "") for each in value]
    return dict(zip(names, value, strict=True)) if all(names) and len(set(names)) == len(names) else None


def shown(value: Any, name: str = "") -> Any:
    """Return a value of the configuration in JSON's types, without secrets. ``name`` is the name of its setting."""
    if isinstance(value, SecretStr):
        return _MASK
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {fields[each].alias or each: shown(getattr(value, each), each) for each in fields if each in value.model_fields_set}
    if isinstance(value, Mapping):
        is_free = name in _FREE
        return {
            key: _MASK if is_free and isinstance(each, str | list | tuple) and _SECRET_NAMES.search(str(key)) else shown(each, name)
            for key, each in value.items()
        }
    if isinstance(value, tuple | list):
        is_command = name == "command"
        return [_MASK if is_command and _is_secret(value, at) else shown(each) for at, each in enumerate(value)]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return _USER_INFO.sub("", _HASH.sub(lambda found: found[0][:15] + "…", value))
    made = to_jsonable_python(value, fallback=str)
    return made if isinstance(made, int | float | bool | None) else shown(made)


def _is_secret(command: Sequence[str], at: int) -> bool:
    """Return whether a part of a command is ``--name=value`` of a secret option, or the value after one."""
    former = command[at - 1] if at else ""
    option, has_value, _ = command[at].partition("=")
    if has_value and option.startswith("-"):
        return _SECRET_NAMES.search(option) is not None
    return former.startswith("-") and "=" not in former and not option.startswith("-") and _SECRET_NAMES.search(former) is not None
