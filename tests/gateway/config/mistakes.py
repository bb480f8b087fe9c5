"""Wrong configurations, each with one mistake, generated from the table of settings.

A mistake is made in a valid document with all kinds of sections. The rule: each mistake knows its line, found by PyYAML and not by the
gateway, and the texts of which the message must contain one.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import yaml

from docs.reference import Setting, groups

Path = tuple[str | int, ...]
HASH = "sha256:" + "9f" * 32

DOCUMENT: Mapping[str, Any] = {
    "server": {
        "host": "127.0.0.1", "port": 8000, "workers": 1,
        "admin": {
            "host": "127.0.0.1", "port": 9090, "token": {"env": "TOKEN"}, "tls": {"cert": "cert.pem", "key": "key.pem"},
            "tokens": [{"name": "prometheus", "hash": "sha256:" + "a" * 64, "role": "viewer", "expires": "2030-01-01"}],
        },
        "tls": {"cert": "cert.pem", "key": "key.pem"},
        "cors": {"origins": ["https://app.example.com"]}, "docs": True, "trusted_proxies": ["10.0.0.0/8"],
        "max_connections_per_address": 64,
        "body_limit": "20MiB", "body_values": 5000, "body_memory": "256MiB", "headers_timeout": "10s", "body_timeout": "60s",
        "write_timeout": "60s", "max_inflight": 1000, "linger": "0s", "drain": "30s",
    },
    "models": [
        {
            "id": "launched", "aliases": ["alias"], "mounts": ["/team/model"],
            "launch": {
                "command": ["vllm-gateway", "simulate"], "model": "Qwen/Qwen3", "preset": "qwen3", "replicas": 1, "gpus": [[0]],
                "args": {"max-model-len": 1024}, "env": {"HF_HUB_OFFLINE": "1"}, "start": "on_demand", "idle_stop": "15m",
                "idle_sleep": "5m", "sleep_level": 1, "group": "big", "startup_timeout": "20m",
            },
            "loras": [{"id": "adapter", "aliases": ["further"], "path": "/loras/a"}],
            "balance": "cost", "cost_policy": {"kv_cache_tokens": 1000, "explain": True},
            "timeouts": {"connect": "2s", "first_byte": "120s", "idle": "60s", "total": "1h"}, "queue": {"size": 10, "wait": "30s"},
            "max_inflight": 64, "keepalive": "15s", "defaults": {"temperature": 0.7}, "overrides": {"seed": 1},
            "body": {"allow": ["priority"], "refuse": ["logprobs"], "max_n": 4, "max_tokens": 100, "media_hosts": ["images.example.com"]},
            "fallbacks": ["running"], "mirror": {"to": "running", "share": "5%", "max_inflight": 4}, "rewrite_model": True,
            "running_usage": True, "price": {"prompt": 0.5, "completion": 2, "cached": 0.1, "reasoning": 2}, "task": "chat",
            "capabilities": ["tools"], "resume": "sampled", "move_after": "5s",
        },
        {"id": "running", "servers": [{"url": "http://127.0.0.1:9", "model": "m", "api_key": {"env": "TOKEN"}, "weight": 2}]},
        {"id": "pods", "discover": {
            "kubernetes": {"service": "vllm", "namespace": "llm", "port": "http"}, "model": "m", "api_key": {"env": "TOKEN"}}},
        {"id": "names", "discover": {"dns": {"name": "localhost", "port": 8000, "interval": "10s"}}},
        {"id": "divided", "split": {"running": 95, "pods": 5}, "sticky": "key"},
    ],
    "default_model": "running",
    "groups": [{"id": "big", "max_running": 1}],
    "keys": [
        {
            "id": "team-a", "hash": HASH,
            "revoked": False, "models": ["running"], "expires": "2099-01-01", "team": "research",
            "priority": 1, "labels": {"cost": "17"}, "user_header": "X-User",
            "limits": {
                "requests_per_minute": 60, "tokens_per_minute": 1000, "tokens_per_day": 1000, "tokens_per_week": 1000,
                "tokens_per_month": 1000, "cost_per_day": 1.5, "cost_per_week": 1.5, "cost_per_month": 1.5, "concurrent": 3,
                "max_tokens": 100, "budgets": [{"window": "7d", "tokens": 100, "cost": 2, "soft": True}],
                "session": {"tokens": 10, "cost": 1}, "per_user": {"concurrent": 2, "missing": "shared", "max_users": 100},
                "models": [{"models": ["running"], "concurrent": 1}],
            },
        },
        {"id": "nobody", "anonymous": True},
        {"id": "people"},
    ],
    "keys_file": "keys.yaml",
    "teams": [{"id": "research", "limits": {"concurrent": 3}}],
    "jwt": [
        {
            "issuer": "https://login.example.com", "audience": ["gateway"], "jwks": "https://login.example.com/keys", "ca": "cert.pem",
            "refresh": "10m", "keys": ["people"], "claims": {"subject": "sub", "team": "groups"}, "algorithms": ["RS256"],
            "leeway": "30s", "token_limit": "8KiB", "subjects": 100,
        }
    ],
    "limits": {"on_store_failure": "allow", "warn_at": 0.8},
    "limits_store": "redis://127.0.0.1:6379/0",
    "ledger": {
        "url": "sqlite:///usage.db", "retention": "90d", "user": True, "metadata": True, "bill_cancelled_prefill": True,
        "sample_interval": "15s",
    },
    "audit": {"secret": {"env": "TOKEN"}, "file": "audit.jsonl", "stdout": True},
    "store": {"url": "ledger", "max_age": "24h"},
    "isolate_prefix_cache": {"secret": {"env": "TOKEN"}},
    "log": {"level": "info", "levels": {"fleet": "debug"}, "format": "json", "user": True, "sample": 0.5},
    "tracing": {"endpoint": "http://127.0.0.1:4318", "sample": 0.5, "trace_url": "https://jaeger.example.com/trace/{trace_id}"},
}  # fmt: skip
"""A valid configuration. Its files are `cert.pem`, `key.pem` and `keys.yaml`, and its variable is `TOKEN`."""

REFERENCES: Mapping[str, tuple[str, ...]] = {
    "models[].fallbacks[]": ("running",),
    "models[].mirror.to": ("running",),
    "models[].launch.group": ("big",),
    "models[].launch.preset": ("qwen3",),
    "default_model": ("running",),
    "keys[].team": ("research",),
    "keys[].models[]": ("running",),
    "keys[].limits.models[].models[]": ("running",),
    "jwt[].keys[]": ("people",),
    "server.admin.token.env": ("TOKEN", "not set"),
    "server.admin.tls.cert": ("cannot be read",),
    "server.admin.tls.key": ("cannot be read",),
    "audit.secret.env": ("TOKEN", "not set"),
    "models[].servers[].api_key.env": ("TOKEN", "not set"),
    "isolate_prefix_cache.secret.env": ("TOKEN", "not set"),
    "server.tls.cert": ("cannot be read",),
    "server.tls.key": ("cannot be read",),
    "jwt[].ca": ("cannot be read",),
    "keys_file": ("cannot be read",),
}
"""Settings that name something, and what the message must contain if it does not exist."""

TYPE_REMEDY = ("expected", "write", "secrets must not", "must be")
RANGE_REMEDY = ("or more", "or less", "more than", "less than", "at most", "at least", "expected", "whole minutes")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A configuration with one mistake: its kind, the setting, the text of the file, the line, and texts of which one must be reported."""

    kind: str
    setting: str
    text: str
    line: int
    remedies: tuple[str, ...]

    def is_explained_by(self, problem: str) -> bool:
        return any(remedy in problem for remedy in self.remedies)


def mistakes(seed: int, count: int) -> list[Mistake]:
    """Return ``count`` mistakes: of each kind equally many, of different settings as far as possible."""
    chance = random.Random(seed)
    settings = [(path, setting) for setting in _settings() for path in _paths(setting.path)]
    by_kind = [list(make(settings, chance)) for make in (_types, _units, _ranges, _names, _misplaced, _references)]
    for made in by_kind:
        chance.shuffle(made)
    rounds = zip_longest(*by_kind)
    return [each for made in rounds for each in made if each is not None][:count]


def _settings() -> Iterator[Setting]:
    for group in groups():
        yield from group.settings


def _paths(spelled: str, value: Any = DOCUMENT, path: Path = ()) -> Iterator[Path]:
    """Yield the paths in the document of a setting such as ``models[].launch.args``."""
    name, _, rest = spelled.partition(".")
    key = name.removesuffix("[]")
    if not isinstance(value, dict) or key not in value:
        return
    entries = [(key, index) for index in range(len(value[key]))] if name.endswith("[]") else [(key,)]
    for entry in entries:
        inner = value[key][entry[1]] if len(entry) > 1 else value[key]
        if rest:
            yield from _paths(rest, inner, (*path, *entry))
        else:
            yield (*path, *entry)


def _written(path: Path, kind: str, remedies: tuple[str, ...], value: Any, name: str | None = None) -> Mistake:
    """Return the document with another value, or another name, at ``path``."""
    document = copy.deepcopy(dict(DOCUMENT))
    holder: Any = document
    for part in path[:-1]:
        holder = holder[part]
    if name is None:
        holder[path[-1]] = value
    else:
        entries = [(name if key == path[-1] else key, value if key == path[-1] else old) for key, old in holder.items()]
        holder.clear()
        holder.update(entries)
        if path[-1] not in dict(entries) and name not in holder:
            raise AssertionError(path)
        path = (*path[:-1], name)
    text = yaml.safe_dump(document, sort_keys=False)
    spelled = re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in path))
    return Mistake(kind, spelled, text, _line(text, path), remedies)


def _line(text: str, path: Path) -> int:
    """Return the line of a path, found by PyYAML: of the key, or of the entry of a list."""
    node, line = yaml.compose(text, Loader=yaml.SafeLoader), 1
    for part in path:
        if isinstance(node, yaml.MappingNode):
            key, node = next((key, value) for key, value in node.value if key.value == part)
            line = key.start_mark.line + 1
        else:
            assert isinstance(node, yaml.SequenceNode) and isinstance(part, int)
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


Position = tuple[Path, Setting]


def _kinds(shape: Mapping[str, Any]) -> set[str]:
    """Return the types that a setting accepts."""
    choices = [each for keyword in ("anyOf", "oneOf") for each in shape.get(keyword, ())]
    if choices:
        return {kind for choice in choices for kind in _kinds(choice)}
    if "$ref" in shape:
        return {"object"}
    kind = shape.get("type", "string")
    return {kind} if isinstance(kind, str) else set(kind)


def _pattern(shape: Mapping[str, Any]) -> str:
    return str(shape.get("pattern", "")) + "".join(_pattern(each) for key in ("anyOf", "oneOf") for each in shape.get(key, ()))


WRONG: Mapping[str, tuple[Any, ...]] = {
    "object": ([], "text", 7, True),
    "array": ({"a": 1}, 7, True),
    "integer": ("many", [1], {"a": 1}, 1.5, "1e3", "1,000"),
    "number": ("much", [1], {"a": 1}, True),
    "boolean": ("maybe", 1, [True], "true"),
    "string": ([], {"a": 1}, 7, True),
}


def _types(settings: list[Position], chance: random.Random) -> Iterator[Mistake]:
    for path, setting in settings:
        kinds = _kinds(setting.shape) - {"null"}
        texts = {"string"} & kinds
        wrong = [
            value for kind in sorted(kinds) for value in WRONG[kind] if not _fits(value, kinds, bool(texts and not _pattern(setting.shape)))
        ]
        if wrong:
            yield _written(path, "type", TYPE_REMEDY, chance.choice(wrong))


def _fits(value: Any, kinds: set[str], free_text: bool) -> bool:
    """Return whether a value has one of the types."""
    if isinstance(value, str):
        return "string" in kinds and free_text
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return bool(kinds & {"integer", "number"})
    if isinstance(value, float):
        return "number" in kinds
    return ("array" if isinstance(value, list) else "object") in kinds


UNITS: Mapping[str, tuple[Any, ...]] = {
    "KiB": ("20", 20, "20mb", "20 MiB", "20M", "1.5.2MiB"),
    "ms": ("30", 30, "30 s", "30sec", "5 minutes", "30S", "1h30m"),
    "%": ("5", 0.05, 5, "5 %", "5pct"),
}


def _units(settings: list[Position], chance: random.Random) -> Iterator[Mistake]:
    for path, setting in settings:
        pattern = _pattern(setting.shape)
        unit = next((unit for unit in UNITS if f"{unit}|" in pattern or f"({unit})$" in pattern), None)
        if unit is not None:
            yield _written(path, "unit", ("with its unit, e.g.", "in percent, e.g.", "rolling window, e.g."), chance.choice(UNITS[unit]))


def _ranges(settings: list[Position], chance: random.Random) -> Iterator[Mistake]:
    for path, setting in settings:
        for shape in (setting.shape, *setting.shape.get("anyOf", ()), *setting.shape.get("oneOf", ())):
            outside = [shape[bound] - 1 for bound in ("minimum",) if bound in shape] + [
                shape[bound] for bound in ("exclusiveMinimum",) if bound in shape
            ]
            outside += [shape[bound] + 1 for bound in ("maximum",) if bound in shape]
            if outside:
                yield _written(path, "range", RANGE_REMEDY, chance.choice(outside))
            if isinstance(shape.get("enum"), list) and shape.get("type") == "string":
                yield _written(path, "range", ("expected", "there is no such"), chance.choice(shape["enum"]) + "x")


def _names(settings: list[Position], chance: random.Random) -> Iterator[Mistake]:
    for path, setting in settings:
        name, value = setting.name, _value(path)
        at = chance.randrange(1, len(name)) if len(name) > 2 else 1
        typos = {
            name[:at] + name[at + 1 :] if len(name) > 3 else f"{name}s",
            f"{name}s",
            name.replace("_", "-"),
            name.title().replace("_", ""),
        }
        siblings = set(_holder(path))
        good = [typo for typo in sorted(typos) if typo != name and typo not in siblings]
        if good:
            yield _written(path, "name", (f"did you mean `{name}`?",), value, chance.choice(good))


def _misplaced(settings: list[Position], chance: random.Random) -> Iterator[Mistake]:
    """Move a setting into another section that has no setting of this name."""
    by_name: dict[str, set[str]] = {}
    for setting in _settings():
        by_name.setdefault(setting.name, set()).add(setting.path.rpartition(".")[0])
    sections = {group.path: {setting.name for setting in group.settings} for group in groups()}
    for path, setting in settings:
        others = [other for other, names in sections.items() if setting.name not in names and list(_paths(other))]
        target = next(_paths(chance.choice(others)))
        document = copy.deepcopy(dict(DOCUMENT))
        holder: Any = document
        for part in target:
            holder = holder[part]
        if not isinstance(holder, dict):
            continue
        holder[setting.name] = _value(path)
        text = yaml.safe_dump(document, sort_keys=False)
        remedies = tuple(f"`{section}`" if section else "the top level of the file" for section in by_name[setting.name])
        line = _line(text, (*target, setting.name))
        yield Mistake("section", f"{setting.path} in {target}", text, line, (*remedies, "did you mean"))


def _references(settings: list[Position], chance: random.Random) -> Iterator[Mistake]:
    for spelled, remedies in REFERENCES.items():
        for path in _entries(spelled):
            value = _value(path)
            at = chance.randrange(1, len(value))
            made = _written(path, "reference", remedies, f"{value[:at]}{value[at + 1 :]}x")
            yield replace(made, line=_line(made.text, path[:-1])) if path[-1] == "env" else made  # a secret is one value


def _entries(spelled: str) -> Iterator[Path]:
    """Yield the paths of a setting, or of the entries of a list."""
    for path in _paths(spelled.removesuffix("[]")):
        if spelled.endswith("[]"):
            yield from ((*path, index) for index in range(len(_value(path))))
        else:
            yield path


def _value(path: Path) -> Any:
    value: Any = DOCUMENT
    for part in path:
        value = value[part]
    return value


def _holder(path: Path) -> Mapping[str, Any]:
    holder: Mapping[str, Any] = _value(path[:-1])
    return holder
