"""The checks of relations between settings: unique names, references to names, and exclusive choices.

Every check is a generator over the raw document, so that it finds its problems however invalid the rest is. It ignores parts with an
invalid shape, which ``models`` reports.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from gateway.config.models import MAX_REPLICAS, matches
from gateway.config.problems import Finding, Path, Problem, did_you_mean, unexpanded
from gateway.config.quantities import parse_duration
from gateway.config.secret import OF_LEDGER
from gateway.config.source import Source
from gateway.config.values import worker_count
from gateway.snapshot.identity import escaped
from gateway.snapshot.snapshot import AUTO, CALENDAR, DEFAULT_CLASS
from gateway.system.addresses import is_loopback
from upstream.vllm import command_line

_ORIGINS = ("launch", "servers", "discover", "split")
_OF_A_SPLIT = frozenset({"id", "aliases", "mounts", "sticky", "task", "capabilities", *_ORIGINS})
"""The settings of a split. All others are for models with servers."""
_FREE = frozenset({"defaults", "overrides", "env", "labels"})
"""Settings with texts that the gateway does not interpret."""
_ADMINISTERED = ("store", "sign_in")
"""Sections that allow changes of keys, teams and sign-ins through the admin port."""
_WILDCARD_HOSTS = ("0.0.0.0", "::")  # noqa: S104  compared, not bound


class ConfigValue(NamedTuple):
    """A value of the raw document, with its file and path."""

    source: Source
    path: Path
    value: Any

    def get(self, *keys: str) -> ConfigValue:
        """Return the value below these keys, or None as its value if there is no value below them."""
        source, path, value = self
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return ConfigValue(source, path + keys, value)

    def items(self) -> Iterator[ConfigValue]:
        """Yield the entries of a list, nothing for any other value."""
        if isinstance(self.value, list):
            for index, value in enumerate(self.value):
                yield ConfigValue(self.source, (*self.path, index), value)

    def each(self, key: str) -> Iterator[ConfigValue]:
        return self.get(key).items()

    def one_or_each(self, key: str) -> Iterator[ConfigValue]:
        """Yield the entries of a list, or a single value."""
        value = self.get(key)
        return value.items() if isinstance(value.value, list) else iter((value,))

    @property
    def url(self) -> ConfigValue:
        """The URL of a database, which may be written alone instead of a section."""
        return self.get("url") if isinstance(self.value, dict) else self

    def problem(self, message: str) -> Problem:
        return self.source.problem(Finding(self.path, message))


@dataclass
class Draft:
    """The raw documents of the main file and of ``keys_file``."""

    main: Source
    keys_file: Source | None = None

    @cached_property
    def top(self) -> ConfigValue:
        """The main file's document."""
        return ConfigValue(self.main, (), self.main.value)

    @cached_property
    def models(self) -> list[ConfigValue]:
        return list(self.top.each("models"))

    @cached_property
    def keys(self) -> list[ConfigValue]:
        """The entries of both files."""
        more = ConfigValue(self.keys_file, (), self.keys_file.value).each("keys") if self.keys_file else ()
        return [*self.top.each("keys"), *more]

    @cached_property
    def self_service(self) -> list[ConfigValue]:
        """The sections about the keys that people of a team create."""
        return [team.get("self_service") for team in self.top.each("teams")]

    @cached_property
    def limits(self) -> list[ConfigValue]:
        """Every mapping of limits: of teams, keys and the keys that people create, and below them for end users and for some models."""
        owners = [owner.get("limits") for owner in [*self.top.each("teams"), *self.self_service, *self.keys]]
        return [
            setting
            for limits in owners
            if isinstance(limits.value, dict)
            for setting in (limits, limits.get("per_user"), *limits.each("models"))
        ]

    @cached_property
    def names(self) -> list[ConfigValue]:
        """Every ID and alias of models and LoRA adapters."""
        return [name for model in self.models for name in all_names(model) if _is_text(name)]

    @cached_property
    def has_all_names(self) -> bool:
        """Whether the name of every model can be read. If not, a name may be missing only for that reason."""
        return isinstance(self.top.get("models").value, list) and all(map(_is_named, self.models))

    @cached_property
    def owners(self) -> dict[str, int]:
        """The number of the model that each name means. A LoRA adapter's names count as names of its model."""
        return {name: number for number, model in enumerate(self.models) for name in texts(all_names(model))}

    @cached_property
    def split_names(self) -> set[str]:
        """The names of splits."""
        return {name for name, number in self.owners.items() if self.models[number].get("split").value is not None}


def texts(settings: Iterable[ConfigValue]) -> list[str]:
    """Return the values that are texts."""
    return [setting.value for setting in settings if _is_text(setting)]


def _is_text(setting: ConfigValue) -> bool:
    return isinstance(setting.value, str)


def own_names(entry: ConfigValue) -> tuple[ConfigValue, ...]:
    """Return the ID and the aliases of a model or an adapter."""
    return (entry.get("id"), *entry.each("aliases"))


def _entries(model: ConfigValue) -> tuple[ConfigValue, ...]:
    return (model, *model.each("loras"))


def all_names(model: ConfigValue) -> Iterator[ConfigValue]:
    """Yield the IDs and the aliases of a model and of its adapters."""
    return chain.from_iterable(map(own_names, _entries(model)))


def _is_named(model: ConfigValue) -> bool:
    """Return whether the IDs and aliases of a model and of its adapters are texts in lists."""
    lists = [model.get("loras").value, *(entry.get("aliases").value for entry in _entries(model))]
    return all(isinstance(value, list | None) for value in lists) and all(map(_is_text, all_names(model)))


def _known_model(draft: Draft, setting: ConfigValue, hidden: Set[str] = frozenset()) -> Iterator[Problem]:
    """Report a text that names no model. ``hidden`` are names that the message does not propose."""
    if _is_text(setting) and setting.value not in draft.owners and draft.has_all_names:
        yield setting.problem(f"there is no such model{did_you_mean(setting.value, draft.owners.keys() - hidden)}")


def _another_model(
    draft: Draft, setting: ConfigValue, own: Collection[str], itself: str, split: str, hidden: Set[str] = frozenset()
) -> Iterator[Problem]:
    """Report a reference of a model to itself, to a split, or to no model. ``itself`` and ``split``: the messages."""
    if setting.value in own:
        yield setting.problem(itself)
    elif setting.value in draft.split_names:
        yield setting.problem(split)
    yield from _known_model(draft, setting, hidden)


def _known(settings: Iterable[ConfigValue], known: Collection[str], what: str) -> Iterator[Problem]:
    """Report each text that is not in ``known``."""
    for setting in settings:
        if _is_text(setting) and setting.value not in known:
            yield setting.problem(f"there is no such {what}{did_you_mean(setting.value, known)}")


def problems(draft: Draft) -> Iterator[Problem]:
    """Yield all problems between the settings of ``draft``."""
    for check in _CHECKS:
        yield from check(draft)


def _repeated(settings: Iterable[ConfigValue], what: str, also: str = "") -> Iterator[Problem]:
    """Yield a problem for every repeated text. ``also`` is appended to the message."""
    first: dict[str, ConfigValue] = {}
    for setting in filter(_is_text, settings):
        before = first.setdefault(setting.value, setting)
        if before is not setting:
            where = f"line {before.source.line(before.path)}"
            if before.source is not setting.source:
                where = f"{before.source.file}:{before.source.line(before.path)}"
            yield setting.problem(f"this {what} is already on {where}{also}")


def _unexpanded(draft: Draft) -> Iterator[Problem]:
    """Report references to environment variables in notations of other programs, which would be taken literally."""
    for source in filter(None, (draft.main, draft.keys_file)):
        pending: list[tuple[Path, Any]] = [((), source.value)]
        while pending:  # a file may have a hundred thousand keys
            path, value = pending.pop()
            if isinstance(value, dict):
                pending += [((*path, key), inner) for key, inner in value.items() if key not in _FREE]
            elif isinstance(value, list):
                pending += [((*path, index), inner) for index, inner in enumerate(value)]
            elif isinstance(value, str) and (hint := unexpanded(value)):
                yield source.problem(Finding(path, hint))


def _some_models(draft: Draft) -> Iterator[Problem]:
    models = draft.top.get("models")
    if not models.value and not isinstance(models.value, str | bool | int):
        yield models.problem("no model is configured; write at least one, e.g. models: [{id: my-model, launch: {}}]")


def _unique_names(draft: Draft) -> Iterator[Problem]:
    yield from _repeated(draft.names, "model name", "; IDs, aliases and LoRA IDs share one namespace")
    yield from _repeated((mount for model in draft.models for mount in model.each("mounts")), "mount")


def _unique_servers(model: ConfigValue) -> Iterator[Problem]:
    urls = [server for server in model.each("servers") if _is_text(server.get("url"))]
    seen = Counter((server.value["url"], str(server.value.get("model"))) for server in urls)
    yield from _repeated((s.get("url") for s in urls if seen[s.value["url"], str(s.value.get("model"))] > 1), "server")


def _one_origin(model: ConfigValue) -> Iterator[Problem]:
    given = [name for name in _ORIGINS if model.get(name).value is not None] if isinstance(model.value, dict) else ["?"]
    if not given:
        yield model.problem("has no servers: write one of launch ({} for the defaults), servers, discover, split")
    for extra in given[1:]:
        yield model.get(extra).problem(f"a model has only one of launch, servers, discover and split; this one already has {given[0]}")


def _one_discovery(model: ConfigValue) -> Iterator[Problem]:
    discover = model.get("discover")
    given = [name for name in ("kubernetes", "dns") if discover.get(name).value is not None]
    if isinstance(discover.value, dict) and len(given) != 1:
        yield discover.problem("expected one of kubernetes and dns")


def _gpus(model: ConfigValue) -> Iterator[Problem]:
    gpus, replicas = model.get("launch", "gpus"), model.get("launch", "replicas").value
    count = 1 if replicas is None else replicas
    if isinstance(gpus.value, list) and type(count) is int and 1 <= count <= MAX_REPLICAS and len(gpus.value) != count:
        yield gpus.problem(
            f"has GPUs for {len(gpus.value)} replicas, but replicas is {count}; write one list of GPUs for each, e.g. [[0, 1]]"
        )
    for replica in gpus.items():
        if isinstance(replica.value, list) and (not replica.value or len(set(map(str, replica.value))) < len(replica.value)):
            yield replica.problem("expected the numbers of this replica's GPUs, each once")


def _launch_settings(model: ConfigValue) -> Iterator[Problem]:
    """Check what the builder of the server's command line would reject."""
    launch = model.get("launch")
    args, env = (value if isinstance(value, dict) else {} for value in (launch.get("args").value, launch.get("env").value))
    gpus = next((replica.value for replica in launch.each("gpus") if isinstance(replica.value, list)), [])
    sleeps = launch.get("idle_sleep").value is not None
    adapters = tuple(command_line.Adapter("-", "-") for _ in model.each("loras"))
    settings = command_line.LaunchSettings(
        model="-", served_names=("-",), args=args, env=env, gpus=tuple(gpus), sleeps=sleeps, adapters=adapters
    )
    for wrong in command_line.problems(settings):
        path, message = wrong.split(": ", 1)
        section, _, name = path.partition(".")
        written = next((key for key in launch.get(section).value if key.replace("_", "-") == name.replace("_", "-")), None)
        yield launch.get(*((section, written) if written else (section,))).problem(message)


def _never_overlap(draft: Draft, one: ConfigValue, other: ConfigValue) -> bool:
    """Return whether two launched models never run at the same time: they share a GPU, or a group that runs one model."""
    group = one.get("launch", "group").value
    alone = isinstance(group, str) and group == other.get("launch", "group").value and _group_bounds(draft).get(group, 1) == 1
    return alone or bool(_gpu_numbers(one) & _gpu_numbers(other))


def _group_bounds(draft: Draft) -> dict[str, Any]:
    """Return how many models of each group run at the same time."""
    bounds = ((group.get("id").value, group.get("max_running").value) for group in draft.top.each("groups"))
    return {str(group): 1 if bound is None else bound for group, bound in bounds}


def _gpu_numbers(model: ConfigValue) -> set[int]:
    return {gpu.value for replica in model.get("launch").each("gpus") for gpu in replica.items() if isinstance(gpu.value, int)}


def _launch_ports(draft: Draft) -> Iterator[Problem]:
    """Check fixed ports of launched servers: unique among those that run at the same time, and not the gateway's own."""
    before: list[tuple[ConfigValue, _Listening]] = []
    for model in draft.models:
        if (mine := _Listening.at(model.get("launch", "args"), "127.0.0.1")) is None:
            continue
        if (own := next((one for one in _own_ports(draft) if one.clashes(mine)), None)) is not None:
            yield mine.setting.problem(f"port {mine.port} is the gateway's own, {'.'.join(map(str, own.setting.path))}")
        else:
            same = (setting for setting, one in before if one.clashes(mine))
            yield from _given_twice(draft, model, same, mine.setting, f"port {mine.port}")
        before.append((model, mine))


def _launch_sockets(draft: Draft) -> Iterator[Problem]:
    """Check fixed sockets of launched servers: a second server would replace the socket of the first."""
    before: list[ConfigValue] = []
    for model in draft.models:
        mine = model.get("launch", "args", "uds")
        if not _is_text(mine):
            continue
        same = (one for one in before if one.get("launch", "args", "uds").value == mine.value)
        yield from _given_twice(draft, model, same, mine, mine.value)
        before.append(model)


def _given_twice(draft: Draft, model: ConfigValue, same: Iterable[ConfigValue], mine: ConfigValue, what: str) -> Iterator[Problem]:
    """Report the address at ``mine`` if a model with the ``same`` address may run at the same time."""
    if (other := next((one for one in same if not _never_overlap(draft, one, model)), None)) is not None:
        yield mine.problem(f"{what} is given to `{other.get('id').value}` too, and both may run at the same time")


class _Listening(NamedTuple):
    """An address on which a server or the gateway will listen."""

    host: str
    port: int
    setting: ConfigValue

    @classmethod
    def at(cls, section: ConfigValue, default_host: str, default_port: int | None = None) -> _Listening | None:
        """Return the address in a section, None if no port is fixed."""
        host, setting = section.get("host").value, section.get("port")
        value = default_port if setting.value is None else setting.value
        fixed = not isinstance(value, bool) and re.fullmatch("[0-9]{1,5}", str(value)) is not None and int(str(value)) > 0
        return cls(str(host or default_host), int(str(value)), setting) if fixed else None

    def clashes(self, other: _Listening) -> bool:
        hosts = {self.host, other.host}
        return self.port == other.port and (len(hosts) == 1 or not hosts.isdisjoint(_WILDCARD_HOSTS))


def _own_ports(draft: Draft) -> Iterator[_Listening]:
    """Yield the data port and the admin port, with their defaults."""
    server = draft.top.get("server")
    data_port = _Listening.at(server, "0.0.0.0", 8000)  # noqa: S104  the default
    yield from filter(None, (data_port, _Listening.at(server.get("admin"), "127.0.0.1", 9090)))


def _replica_addresses(model: ConfigValue) -> Iterator[Problem]:
    """Replicas cannot share an address."""
    launch = model.get("launch")
    replicas, args = launch.get("replicas").value, launch.get("args")
    if type(replicas) is int and replicas > 1:
        for name in [name for name in ("port", "uds") if args.get(name).value is not None]:
            yield args.get(name).problem(f"{replicas} replicas cannot share one {name}; omit it, and each gets its own socket")


def _groups(draft: Draft) -> Iterator[Problem]:
    groups = [group.get("id") for group in draft.top.each("groups")]
    yield from _repeated(groups, "group")
    if known := texts(groups):
        yield from _known((model.get("launch", "group") for model in draft.models), known, "group")


def _eager_in_groups(draft: Draft) -> Iterator[Problem]:
    """Check that a group can run all its eager models."""
    bounds = _group_bounds(draft)
    eager = Counter[str]()
    for model in draft.models:
        launch = model.get("launch")
        group, start = launch.get("group").value, launch.get("start")
        if not isinstance(group, str) or start.value not in (None, "eager"):
            continue
        eager[group] += 1
        bound = bounds.get(group, 1)
        if isinstance(bound, int) and eager[group] > bound:
            yield start.problem(f"the group `{group}` runs {bound} at once, and more of its models are eager; write on_demand")


def _idle_order(model: ConfigValue) -> Iterator[Problem]:
    launch = model.get("launch")
    stop, sleep = (_seconds(launch.get(name)) for name in ("idle_stop", "idle_sleep"))
    if stop is not None and sleep is not None and stop <= sleep:
        yield launch.get("idle_sleep").problem("the servers would stop before they sleep: idle_stop must be longer")


def _seconds(setting: ConfigValue) -> float | None:
    try:
        return parse_duration(setting.value)
    except ValueError:
        return None


def _launched_loras(model: ConfigValue) -> Iterator[Problem]:
    for lora in model.each("loras"):
        if model.get("launch").value is not None and isinstance(lora.value, dict) and lora.get("path").value is None:
            yield lora.problem("path is missing: where the launched server loads the adapter from")


def _body_fields(model: ConfigValue) -> Iterator[Problem]:
    body = model.get("body")
    refused = [setting.value for setting in body.each("refuse")]
    for setting in body.each("allow"):
        if setting.value in refused:
            yield setting.problem("is also in body.refuse; write the field in one list only")


def _fallbacks(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        own = texts(all_names(model))
        for setting in filter(_is_text, model.each("fallbacks")):
            yield from _another_model(draft, setting, own, "a model cannot be its own fallback", "is a split; write one of its models")


def _mirrors(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        to, own = model.get("mirror", "to"), texts(own_names(model))
        if _is_text(to):
            yield from _another_model(draft, to, own, "is the model itself; name another model", "is a split; write one of its models")


def _splits(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        split, sticky = model.get("split"), model.get("sticky")
        if split.value is None:
            if sticky.value is not None:
                yield sticky.problem("has no effect without split")
            continue
        for name in sorted(map(str, model.value.keys() - _OF_A_SPLIT)):
            if model.get(name).value is not None:
                yield model.get(name).problem("a split has no servers, and so no such setting; set it for the models of the split")
        if isinstance(split.value, dict):
            yield from _targets(draft, model, split)


def _targets(draft: Draft, model: ConfigValue, split: ConfigValue) -> Iterator[Problem]:
    """Check the models of a split and their weights."""
    own = set(texts(all_names(model)))
    for name in split.value:
        target = split.get(name)._replace(value=name)
        if _is_text(target):
            yield from _another_model(draft, target, own, "a split cannot contain itself", "is a split itself; write its models", own)
    for entry in chain.from_iterable(map(_entries, draft.models)):
        same = [name for name in texts(own_names(entry)) if name in split.value]
        for name in same[1:]:
            yield split.get(name).problem(f"is the same model as {same[0]}")
    if split.value and all(weight == 0 for weight in split.value.values()):
        yield split.problem("all weights are 0, so no model would get a request")


def _fallback_loops(draft: Draft) -> Iterator[Problem]:
    """Report the first loop of models that are each other's fallbacks."""
    ways = [{draft.owners.get(str(setting.value)): setting for setting in model.each("fallbacks")} for model in draft.models]
    order = TopologicalSorter({number: [other for other in others if other not in (None, number)] for number, others in enumerate(ways)})
    try:
        order.prepare()
    except CycleError as error:
        loop = error.args[1][::-1]  # each is followed by one of its fallbacks; the last is the first again
        settings = [ways[model][other] for model, other in pairwise(loop)]
        yield settings[0].problem(f"the fallbacks form a loop: {' -> '.join(str(setting.value) for setting in [*settings, settings[0]])}")


def _some_keys(draft: Draft) -> Iterator[Problem]:
    keys, other = draft.top.get("keys"), draft.top.get("keys_file")
    readable = draft.keys_file is None or draft.keys_file.whole
    if not draft.keys and readable and keys.value in (None, []) and draft.top.get("store").value is None:
        message = "no keys are configured, so no client could use the gateway; create a key with `vllm-gateway keys new --id NAME`"
        yield (keys if other.value is None else other).problem(message)


def _store_of_ledger(draft: Draft) -> Iterator[Problem]:
    """Check that the store's database is known."""
    url = draft.top.get("store").url
    if url.value == OF_LEDGER and draft.top.get("ledger").value is None:
        yield url.problem("there is no ledger; set ledger, or write the URL of a database here")


def _unique_keys(draft: Draft) -> Iterator[Problem]:
    yield from _repeated((key.get("id") for key in draft.keys), "key id")
    yield from _repeated((setting for key in draft.keys for setting in hashes_of(key)), "hash", "; a key belongs to one entry")


def hashes_of(key: ConfigValue) -> Iterator[ConfigValue]:
    """Yield the hashes of an entry in lowercase."""
    for one in key.one_or_each("hash"):
        setting = one.get("hash") if isinstance(one.value, dict) else one
        if _is_text(setting):
            yield setting._replace(value=setting.value.lower())


def _of_tokens(draft: Draft) -> list[ConfigValue]:
    """Return the IDs of key entries as which tokens count."""
    return [setting for issuer in draft.top.each("jwt") for setting in issuer.one_or_each("keys") if _is_text(setting)]


def _user_headers(draft: Draft) -> Iterator[Problem]:
    """Check that only clients with a key can name an end user: others could name anyone."""
    for key in draft.keys:
        if key.get("user_header").value is not None and key.get("anonymous").value is True:
            yield key.get("user_header").problem("an anonymous entry is used by unknown clients, which could name any user")
        users = key.get("limits", "per_user")
        if users.value is not None and key.get("anonymous").value is True:
            yield users.problem("an anonymous entry is used by unknown clients, whose end users are not known")


def _entries_of_tokens(draft: Draft) -> Iterator[Problem]:
    """Check that tokens count as entries that exist, each for one issuer, and none for requests without a key."""
    if not (of_tokens := _of_tokens(draft)):
        return
    is_anonymous = {key.get("id").value: key.get("anonymous").value is True for key in draft.keys if _is_text(key.get("id"))}
    has_all_ids = isinstance(draft.top.get("keys").value, list | None) and all(_is_text(key.get("id")) for key in draft.keys)
    yield from _repeated(of_tokens, "entry of keys", "; subjects of two issuers would be indistinguishable")
    for setting in of_tokens:
        if is_anonymous.get(setting.value):
            yield setting.problem("is the entry for requests without a key; tokens need another entry")
        elif setting.value not in is_anonymous and has_all_ids:
            yield setting.problem(f"there is no such entry of keys{did_you_mean(setting.value, is_anonymous)}")


def _ids_of_subjects(draft: Draft) -> Iterator[Problem]:
    """Check that no key has an ID that a token's subject could get."""
    of_tokens = {entry for setting in _of_tokens(draft) for entry in (setting.value, escaped(setting.value))}
    for key in draft.keys if of_tokens else ():
        parts = str(key.get("id").value).split("/")
        if any("/".join(parts[:length]) in of_tokens for length in range(1, len(parts))):
            yield key.get("id").problem("a token's subject could get this ID after the ID of its entry; choose another")


def _issuers(draft: Draft) -> Iterator[Problem]:
    yield from _repeated((issuer.get("issuer") for issuer in draft.top.each("jwt")), "issuer")
    for issuer in draft.top.each("jwt"):
        keys = issuer.get("keys")
        if isinstance(keys.value, list) and len(keys.value) > 1 and issuer.get("claims", "key").value is None:
            yield keys.problem("set claims.key to select the entry of a token, or write a single entry")


def _sign_in(draft: Draft) -> Iterator[Problem]:
    section = draft.top.get("sign_in")
    if not isinstance(section.value, dict):
        return
    if draft.top.get("ledger").value is None and draft.top.get("store").value is None:
        yield section.problem("requires a database for people and sessions: set store or ledger")
    issuers = list(section.each("issuers"))
    yield from _repeated((issuer.get("id") for issuer in issuers), "ID of an issuer")
    yield from _repeated((issuer.get("issuer") for issuer in issuers), "issuer")
    roles = section.get("roles").value
    for issuer in issuers:
        claims = issuer.get("claims")
        if not any(claims.get(name).value is not None for name in ("roles", "teams", "owned_teams")):
            yield claims.problem("grants nothing, so no person could sign in there: set claims.roles, claims.teams, or both")
        if claims.get("roles").value is not None and not roles:
            yield claims.get("roles").problem("has no effect: `sign_in.roles` maps no value to a role")


def _hash_or_anonymous(draft: Draft) -> Iterator[Problem]:
    """Check that each entry has a hash, is anonymous, or is an entry of tokens."""
    first: ConfigValue | None = None
    of_tokens = {setting.value for setting in _of_tokens(draft)}
    are_tokens_known = of_tokens <= {key.get("id").value for key in draft.keys if _is_text(key.get("id"))}
    for key in draft.keys:
        identity, anonymous, hashes = key.get("id"), key.get("anonymous"), key.get("hash")
        if not isinstance(key.value, dict) or not isinstance(anonymous.value, bool | None):
            continue
        if anonymous.value is True:
            if hashes.value is not None:
                yield hashes.problem("the anonymous entry must not have a hash: it is for requests without a key")
            if first is not None:
                yield anonymous.problem(f"only one entry can be anonymous; `{first.get('id').value}` is")
            first = first or key
            continue
        # With an invalid ID, here or where tokens name their entry, this may be the entry of tokens.
        has_valid_id = identity.value is None or _is_text(identity)
        may_be_of_tokens = not has_valid_id or not are_tokens_known or identity.value in of_tokens
        if hashes.value in (None, []) and not may_be_of_tokens:
            how = "sha256:… of a key (see `vllm-gateway keys new`), or anonymous: true for requests without a key"
            yield hashes.problem(f"is missing: {how}")


def _scopes(draft: Draft) -> Iterator[Problem]:
    yield from _patterns(draft, [*draft.keys, *draft.self_service], draft.owners)


def _of_keys(section: str, field: str, *built_in: str) -> Callable[[Draft], Iterator[Problem]]:
    """Return the check that the IDs of a section differ, and that keys name only these in a field."""

    def check(draft: Draft) -> Iterator[Problem]:
        ids = [each.get("id") for each in draft.top.each(section)]
        yield from _repeated(ids, field)
        if isinstance(draft.top.get(section).value, list | None) and all(map(_is_text, ids)):
            yield from _known((key.get(field) for key in draft.keys), [*texts(ids), *built_in], field)

    return check


def _reserved_slots(draft: Draft) -> Iterator[Problem]:
    """Check that reserved slots leave some for the classes after them, and that there is an objective to follow."""
    limited = [model for model in draft.models if model.get("max_inflight").value is not None]
    without_slo = [model for model in limited if model.get("slo").value is None]
    for each in draft.top.each("classes"):
        reserved = each.get("reserved_slots")
        if isinstance(reserved.value, int):
            yield from islice(_too_few_left(draft, reserved, limited), 1)
        elif reserved.value == AUTO and each.get("slo").value is None and without_slo:
            name = without_slo[0].get("id").value
            yield reserved.problem(f"auto needs an objective to follow: set `slo` of the class, or of the model {name}")


def _too_few_left(draft: Draft, reserved: ConfigValue, limited: Iterable[ConfigValue]) -> Iterator[Problem]:
    """Report each model whose reserved slots leave none for later classes in each worker."""
    workers = worker_count(draft.top.get("server", "workers").value)
    if not isinstance(workers, int):
        return
    for model in limited:
        most = model.get("max_inflight").value
        if isinstance(most, int) and most - reserved.value < max(workers, 1):
            where, name = f" for each of the {workers} workers" if workers > 1 else "", model.get("id").value
            yield reserved.problem(f"of the {most} slots of {name}, none is left for later classes{where}; reserve fewer")


def _ports(draft: Draft) -> Iterator[Problem]:
    match list(_own_ports(draft)):
        case [data, admin] if data.clashes(admin):
            yield admin.setting.problem(f"the admin port and the data port are both {data.port}; use different ports")


def _admin_tokens(draft: Draft) -> Iterator[Problem]:
    admin = draft.top.get("server", "admin")
    yield from _repeated((token.get("name") for token in admin.each("tokens")), "token name")
    yield from _repeated((token.get("hash") for token in admin.each("tokens")), "hash", "; each token has one entry")


def open_admin_host(draft: Draft) -> ConfigValue | None:
    """Return the host of the admin port if other machines reach it without a token."""
    admin = draft.top.get("server", "admin")
    host = admin.get("host")
    is_reachable = isinstance(host.value, str) and not is_loopback(host.value)
    return host if is_reachable and not (admin.get("token").value or admin.get("tokens").value) else None


def _open_admin_port(draft: Draft) -> Iterator[Problem]:
    """Check that only authenticated clients reach an admin port that can change keys, teams or sign-ins."""
    if (host := open_admin_host(draft)) is not None and any(draft.top.get(name).value is not None for name in _ADMINISTERED):
        yield host.problem("other machines could change keys here without authentication: set server.admin.tokens, or listen on 127.0.0.1")


def _audit_location(draft: Draft) -> Iterator[Problem]:
    audit = draft.top.get("audit")
    databases = (draft.top.get(name).value for name in ("store", "ledger"))
    if isinstance(audit.value, dict) and audit.get("file").value is None and not any(databases):
        yield audit.problem("set audit.file, or store or ledger for its table")


def _notices(draft: Draft) -> Iterator[Problem]:
    """Check that the names of notices differ, and that mail has a server."""
    rules = list(draft.top.each("notices"))
    yield from _repeated((rule.get("name") for rule in rules), "notice")
    if draft.top.get("smtp").value is None:
        mails = (rule.get("mail") for rule in rules)
        yield from (mail.problem("mail requires a mail server; set smtp") for mail in mails if mail.value is not None)


def _served_models(draft: Draft) -> Iterator[Problem]:
    """Check the models of limits and of records, to which a split does not belong."""
    yield from _patterns(draft, [*draft.limits, draft.top.get("record")], draft.owners.keys() - draft.split_names)


def _patterns(draft: Draft, holders: Iterable[ConfigValue], served: Collection[str]) -> Iterator[Problem]:
    """Check that patterns match one of these models. Each pattern is evaluated once, even if many holders share it."""

    @cache
    def wrong(pattern: str) -> str:
        if any(matches(pattern, name) for name in served):
            return ""
        if any(matches(pattern, name) for name in draft.split_names):
            return "matches only a split, whose requests count for the models that serve them; write these"
        return f"matches no model{did_you_mean(pattern, draft.owners)}"

    for holder in holders if draft.has_all_names else ():
        for setting in filter(_is_text, holder.each("models")):
            if reason := wrong(setting.value):
                yield setting.problem(reason)


def _empty_limits(draft: Draft) -> Iterator[Problem]:
    for limits in draft.limits:
        if "models" in limits.path and isinstance(limits.value, dict) and set(limits.value) == {"models"}:
            yield limits.problem("contains no limit, e.g. requests_per_minute")


def _priced(draft: Draft) -> Iterator[Problem]:
    """Check that a limit of cost has a price: without one it would never be reached."""
    if not isinstance(draft.top.get("models").value, list) or any(model.get("price").value is not None for model in draft.models):
        return
    for limits in draft.limits:
        for cost in costs_in(limits):
            yield cost.problem("no model has a price, so no request has a cost; set models[].price")


def costs_in(limits: ConfigValue) -> Iterator[ConfigValue]:
    """Yield each limit of cost."""
    found = (
        *(limits.get(f"cost_per_{window}") for window in CALENDAR),
        *(each.get("cost") for each in (limits.get("session"), *limits.each("budgets"))),
    )
    yield from (cost for cost in found if cost.value is not None)


def _divided_bounds(draft: Draft) -> Iterator[Problem]:
    """Check that each worker gets a part of every limit. A worker without one would reject all requests."""
    workers = worker_count(draft.top.get("server", "workers").value)
    if not isinstance(workers, int):
        return
    for most in (draft.top.get("server", "max_inflight"), *(model.get("max_inflight") for model in draft.models)):
        if isinstance(most.value, int) and 0 < most.value < workers:
            message = (
                f"{workers} workers cannot share {most.value} requests: each needs at least one; raise this limit or lower server.workers"
            )
            yield most.problem(message)


def _of_each_model(check: Callable[[ConfigValue], Iterator[Problem]]) -> Callable[[Draft], Iterator[Problem]]:
    return lambda draft: chain.from_iterable(map(check, draft.models))


_CHECKS: tuple[Callable[[Draft], Iterator[Problem]], ...] = (
    _unexpanded,
    _some_models,
    _unique_names,
    *map(_of_each_model, (_unique_servers, _one_origin, _one_discovery, _gpus, _launch_settings)),
    _launch_ports,
    _launch_sockets,
    _of_each_model(_replica_addresses),
    _groups,
    _eager_in_groups,
    *map(_of_each_model, (_idle_order, _launched_loras, _body_fields)),
    _fallbacks,
    _mirrors,
    _splits,
    lambda draft: _known_model(draft, draft.top.get("default_model")),
    _fallback_loops,
    _some_keys,
    _store_of_ledger,
    _unique_keys,
    _hash_or_anonymous,
    _user_headers,
    _issuers,
    _entries_of_tokens,
    _ids_of_subjects,
    _sign_in,
    _scopes,
    _of_keys("teams", "team"),
    _of_keys("classes", "class", DEFAULT_CLASS),
    _reserved_slots,
    _ports,
    _admin_tokens,
    _open_admin_port,
    _audit_location,
    _notices,
    _served_models,
    _empty_limits,
    _priced,
    _divided_bounds,
)
