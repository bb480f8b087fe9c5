"""Resolve a model name for a key: which model it means, and whether the key may use it.

It owns the names of one snapshot: ids, aliases and mounts, each a dict look-up. The rule: an unknown model and a model outside a
key's scope get the same response with the same text, so clients cannot probe for names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from gateway.api.errors import Refusal, invalid_value, unknown_model
from gateway.api.routes import ROUTES, Route
from gateway.auth.body_policy import BodyPolicy
from gateway.auth.split import Split
from gateway.snapshot.snapshot import Key, Mirror, Model
from upstream.balancing.cost_model import CostModel
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.cost import Cost
from upstream.balancing.pool import Pool, SharedPool
from upstream.balancing.server import Server

_IDS = 0x1_0000_0000  # values of the last eight hexadecimal digits of a request's ID


def _never(_: Model) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class MirrorTarget:
    """The model that gets copies of requests, and how many copies may be in flight. ``below``: the share of the requests times ``_IDS``."""

    entry: CatalogEntry
    max_inflight: int
    below: int


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model with its live servers and its body policy.

    ``name``: the model name in its responses; None: unchanged. ``split``: chooses the model that serves a request; None for a model with
    servers. ``mirror``: the model that gets copies of its requests. ``is_recorded``: its requests may be recorded. ``is_observed``:
    either of both, so that one check decides for all other models.
    """

    model: Model
    pool: Pool
    policy: BodyPolicy
    name: str | None = None
    split: Split[CatalogEntry] | None = None
    mirror: MirrorTarget | None = None
    is_recorded: bool = False
    is_observed: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """The result of a path look-up: the route, and the model if the path starts with a mount."""

    route: Route
    mounted: CatalogEntry | None = None


class Catalog:
    """The models of one snapshot."""

    def __init__(
        self,
        models: Iterable[Model],
        servers: Mapping[str, Server],
        default: str | None = None,
        costs: Mapping[str, CostModel] = {},
        is_recorded: Callable[[Model], bool] = _never,
    ) -> None:
        """Compile the models. ``costs`` has what is known of the servers of each model with the policy ``cost``, by the model's ID.

        ``is_recorded`` returns whether requests for a model may be recorded.
        """
        self._costs = costs
        self._pools: dict[str, Pool] = {}  # an adapter has its base's
        entries = {
            model.id: CatalogEntry(
                model,
                self._pool(model, servers),
                BodyPolicy.for_model(model),
                model.id if model.rewrite else None,
                is_recorded=recorded,
                is_observed=recorded or model.mirror is not None,
            )
            for model, recorded in ((model, is_recorded(model)) for model in models)
        }
        entries |= {
            name: _with_mirror(entry, mirror, entries) for name, entry in entries.items() if (mirror := entry.model.mirror) is not None
        }
        self.entries = tuple(_with_split(entry, entries) if entry.model.split else entry for entry in entries.values())
        self._by_name = {name: entry for entry in self.entries for name in (entry.model.id, *entry.model.aliases)}
        self._by_id = {entry.model.id: entry for entry in self.entries}
        self._mounts = {mount.rstrip("/"): entry for entry in self.entries for mount in entry.model.mounts}
        self._default = default
        self.targets: dict[bytes, Target] = {}
        for path, route in ROUTES.items():
            self._add_target(path, Target(route))
            for mount, entry in self._mounts.items():
                self._add_target(mount + path, Target(route, entry))
        self._scopes: dict[tuple[str, ...], frozenset[str]] = {}

    def _add_target(self, path: str, target: Target) -> None:
        """Add a path, with and without a trailing slash. vLLM redirects from one to the other, which not every client follows."""
        self.targets[path.encode()] = self.targets[path.encode() + b"/"] = target

    def _pool(self, model: Model, servers: Mapping[str, Server]) -> Pool:
        found = self._pools.get(model.base)
        if found is None:
            pooled = [servers[spec.name] for spec in model.servers]
            kind, costs = POLICIES[model.balance], self._costs.get(model.base)
            settings = kind.settings(**model.policy)
            policy = kind(pooled, settings) if costs is None else Cost(pooled, settings, costs)
            found = self._pools[model.base] = (SharedPool if any(server.is_shared for server in pooled) else Pool)(pooled, policy)
        return found

    def retire(self) -> None:
        """Retire the pools, because there is a new snapshot."""
        for pool in self._pools.values():
            pool.retire()

    def hand_over(self, newer: Catalog) -> None:
        """Let requests that have a model of this catalog choose among the servers of a newer one."""
        for model, pool in self._pools.items():
            pool.successor = newer.pool(model)

    def mounted(self, path: str, suffix: str) -> CatalogEntry | None:
        """Return the model whose mount, followed by ``suffix``, is this path."""
        return self._mounts.get(path.removesuffix(suffix)) if path.endswith(suffix) else None

    def resolve(self, name: object, key: Key, mounted: CatalogEntry | None = None) -> CatalogEntry:
        """Return the model that a request names in its field ``model``. None and an empty text name no model.

        ``mounted`` may belong to the previous snapshot. Raises Refusal: model_not_found, or invalid_value for anything but a string.
        """
        if type(name) is not str or not name:
            return self._resolve_unnamed(name, key, mounted)
        entry = self._by_name.get(name)
        if entry is None or (mounted is not None and entry.model.id != mounted.model.id):
            raise unknown_model(name)
        # Most keys may use every model: for them, a call is saved.
        if (key.models is not None or key.within is not None) and not self._allows(key, entry.model):
            raise unknown_model(name)
        return entry

    def _resolve_unnamed(self, name: object, key: Key, mounted: CatalogEntry | None) -> CatalogEntry:
        """Return the model of a request without a name: the model of its mount, the default, or the only model that the key may use.

        A LoRA adapter does not count if its base may be used, since vLLM then serves the base. Raises Refusal model_not_found if the key
        may not use the default, missing_required_parameter if several models are left, and invalid_value if ``name`` is not a text.
        """
        if name is not None and not isinstance(name, str):
            raise invalid_value("The field 'model' must be the ID of a model, as a string.", param="model")
        if mounted is not None:
            return self.resolve(mounted.model.id, key, mounted)
        if self._default is not None:
            entry = self._by_name[self._default]
            if not self._allows(key, entry.model):
                raise unknown_model("")
            return entry
        visible = self.visible(key)
        ids = {entry.model.id for entry in visible}
        found = [entry for entry in visible if entry.model.parent not in ids]
        if len(found) != 1:
            raise Refusal("missing_required_parameter", "The field 'model' is missing. GET /v1/models lists the models.", param="model")
        return found[0]

    def fallbacks(self, entry: CatalogEntry, key: Key, named: CatalogEntry) -> list[CatalogEntry]:
        """Return the fallbacks of a model that the key may use. ``named``: what the request named, the model or a split.

        A key that may use a split may use its models through it.
        """
        others, allowed = (self._by_name[name] for name in entry.model.fallbacks), dict(named.model.split)
        return [other for other in others if other.model.id in allowed or self._allows(key, other.model)]

    def pool(self, model: str) -> Pool | None:
        """Return the servers of the model with this id, if it exists."""
        entry = self._by_id.get(model)
        return entry.pool if entry is not None else None

    def visible(self, key: Key, mounted: CatalogEntry | None = None) -> list[CatalogEntry]:
        """Return the models that a key may use, in the order of the configuration."""
        return [entry for entry in self.entries if mounted in (None, entry) and self._allows(key, entry.model)]

    def _allows(self, key: Key, model: Model) -> bool:
        of_key, of_token = key.models, key.within
        return (of_key is None or model.id in self._scope(of_key)) and (of_token is None or model.id in self._scope(of_token))

    def _scope(self, globs: tuple[str, ...]) -> frozenset[str]:
        """Return the IDs of models whose ID or alias matches the globs; computed once for each set of globs."""
        scope = self._scopes.get(globs)
        if scope is None:
            scope = self._scopes[globs] = frozenset(entry.model.id for entry in self.entries if entry.model.is_in(globs))
        return scope


def _with_mirror(entry: CatalogEntry, mirror: Mirror, entries: Mapping[str, CatalogEntry]) -> CatalogEntry:
    return replace(entry, mirror=MirrorTarget(entries[mirror.to], mirror.max_inflight, round(mirror.share * _IDS)))


def _with_split(entry: CatalogEntry, entries: Mapping[str, CatalogEntry]) -> CatalogEntry:
    model = entry.model
    return replace(entry, split=Split([(identity, entries[identity], weight) for identity, weight in model.split], model.sticky))
