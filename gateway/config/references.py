"""What settings say about each other: names that must be unique, names that must exist, choices that exclude.

Every check is a generator over the raw document, so that it finds what it can however wrong the rest is: a
part that has not the right shape is simply not there for it. The shape itself is judged in ``models``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, NamedTuple

from gateway.config.models import matches
from gateway.config.problems import Finding, Path, Problem, did_you_mean
from gateway.config.quantities import parse_duration
from gateway.config.source import Source
from upstream.vllm import command_line

_ORIGINS = ("launch", "servers", "discover")
_WILDCARD_HOSTS = ("0.0.0.0", "::")  # noqa: S104  compared, not bound


class Place(NamedTuple):
    """A value of the raw document and where it is."""

    source: Source
    path: Path
    value: Any

    def get(self, *keys: str) -> Place:
        """What is below, with None as value where there is nothing."""
        source, path, value = self
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return Place(source, path + keys, value)

    def items(self) -> Iterator[Place]:
        """The members of a list; nothing when it is none."""
        if isinstance(self.value, list):
            for index, value in enumerate(self.value):
                yield Place(self.source, (*self.path, index), value)

    def each(self, key: str) -> Iterator[Place]:
        return self.get(key).items()

    def problem(self, message: str) -> Problem:
        return self.source.problem(Finding(self.path, message))


@dataclass
class Draft:
    """The main file and the one that ``keys_file`` names, as they were written."""

    main: Source
    keys_file: Source | None = None
    top: Place = field(init=False)

    def __post_init__(self) -> None:
        self.top = Place(self.main, (), self.main.value)

    @cached_property
    def models(self) -> list[Place]:
        return list(self.top.each("models"))

    @cached_property
    def keys(self) -> list[Place]:
        """The entries of both files."""
        more = Place(self.keys_file, (), self.keys_file.value).each("keys") if self.keys_file else ()
        return [*self.top.each("keys"), *more]

    @cached_property
    def limits(self) -> list[Place]:
        """Every mapping of limits: those of teams and keys, and those for some of the models below them."""
        owners = [owner.get("limits") for owner in [*self.top.each("teams"), *self.keys]]
        return [place for limits in owners if isinstance(limits.value, dict) for place in (limits, *limits.each("models"))]

    @cached_property
    def names(self) -> list[Place]:
        """Every id and alias, of models and of LoRA adapters: what clients can ask for."""
        return [name for model in self.models for name in _names(model) if isinstance(name.value, str)]

    @cached_property
    def known(self) -> set[str]:
        return {name.value for name in self.names}


def _names(model: Place) -> Iterator[Place]:
    yield model.get("id")
    yield from model.each("aliases")
    for lora in model.each("loras"):
        yield lora.get("id")
        yield from lora.each("aliases")


def problems(draft: Draft) -> Iterator[Problem]:
    """Everything that is wrong between the settings of ``draft``."""
    for check in _CHECKS:
        yield from check(draft)


def _repeated(places: Iterable[Place], what: str, also: str = "") -> Iterator[Problem]:
    """A problem for every text that was there before. ``also`` says what it would lead to."""
    first: dict[str, Place] = {}
    for place in places:
        if not isinstance(place.value, str):
            continue
        before = first.setdefault(place.value, place)
        if before is not place:
            where = f"line {before.source.line(before.path)}"
            if before.source is not place.source:
                where = f"{before.source.file}:{before.source.line(before.path)}"
            yield place.problem(f"this {what} is already on {where}{also}")


def _some_models(draft: Draft) -> Iterator[Problem]:
    models = draft.top.get("models")
    if not models.value and not isinstance(models.value, str | bool | int):
        yield models.problem("no model is configured; write at least one, e.g. models: [{id: my-model, launch: {}}]")


def _unique_names(draft: Draft) -> Iterator[Problem]:
    yield from _repeated(draft.names, "name of a model", "; ids, aliases and LoRA ids are one set of names")


def _unique_mounts(draft: Draft) -> Iterator[Problem]:
    yield from _repeated((mount for model in draft.models for mount in model.each("mounts")), "mount")


def _unique_servers(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        urls = [server for server in model.each("servers") if isinstance(server.get("url").value, str)]
        seen = Counter((server.value["url"], str(server.value.get("model"))) for server in urls)
        yield from _repeated((s.get("url") for s in urls if seen[s.value["url"], str(s.value.get("model"))] > 1), "server")


def _one_origin(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        given = [name for name in _ORIGINS if model.get(name).value is not None] if isinstance(model.value, dict) else ["?"]
        if not given:
            yield model.problem("has no servers: write one of launch ({} for the defaults), servers, discover")
        for extra in given[1:]:
            yield model.get(extra).problem(f"a model has one of launch, servers and discover; this one has {given[0]} already")


def _one_discovery(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        discover = model.get("discover")
        given = [name for name in ("kubernetes", "dns") if discover.get(name).value is not None]
        if isinstance(discover.value, dict) and len(given) != 1:
            yield discover.problem("expected one of kubernetes and dns")


def _gpus(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        gpus, replicas = model.get("launch", "gpus"), model.get("launch", "replicas").value
        count = 1 if replicas is None else replicas
        if isinstance(gpus.value, list) and type(count) is int and len(gpus.value) != count:
            yield gpus.problem(
                f"has GPUs for {len(gpus.value)} replicas, but replicas is {count}; write one list of GPUs for each, e.g. [[0, 1]]"
            )
        for replica in gpus.items():
            yield from _replica(replica)


def _replica(replica: Place) -> Iterator[Problem]:
    """One replica's GPUs: some, and each once."""
    if isinstance(replica.value, list) and (not replica.value or len({str(gpu) for gpu in replica.value}) < len(replica.value)):
        yield replica.problem("expected the numbers of this replica's GPUs, each once")


def _launch_settings(draft: Draft) -> Iterator[Problem]:
    """What the builder of the server's command line would refuse."""
    for model in draft.models:
        launch = model.get("launch")
        args, env = (value if isinstance(value, dict) else {} for value in (launch.get("args").value, launch.get("env").value))
        gpus = next((replica.value for replica in launch.each("gpus") if isinstance(replica.value, list)), [])
        sleeps = launch.get("idle_sleep").value is not None
        adapters = tuple(command_line.Adapter("-", "-") for _ in model.each("loras"))
        settings = command_line.LaunchSettings(
            model="-", served_names=("-",), args=args, env=env, gpus=tuple(gpus), sleeps=sleeps, adapters=adapters
        )
        for wrong in command_line.problems(settings):
            place, message = wrong.split(": ", 1)
            section, _, name = place.partition(".")
            written = next((key for key in launch.get(section).value if key.replace("_", "-") == name.replace("_", "-")), None)
            yield launch.get(*((section, written) if written else (section,))).problem(message)


def _take_turns(draft: Draft, one: Place, other: Place) -> bool:
    """Whether two launched models are never up at the same time: for a group that runs one at once, or for a GPU of both."""
    group = one.get("launch", "group").value
    bounds = {entry.get("id").value: entry.get("max_running").value for entry in draft.top.each("groups") if _is_text(entry.get("id"))}
    alone = isinstance(group, str) and group == other.get("launch", "group").value and bounds.get(group) in (None, 1)
    return alone or bool(_gpu_numbers(one) & _gpu_numbers(other))


def _gpu_numbers(model: Place) -> set[int]:
    return {gpu.value for replica in model.get("launch").each("gpus") for gpu in replica.items() if isinstance(gpu.value, int)}


def _is_text(place: Place) -> bool:
    return isinstance(place.value, str)


def _launch_ports(draft: Draft) -> Iterator[Problem]:
    """Fixed ports of launched servers: one of its own for each that runs at the same time, and none of the gateway's."""
    before: list[tuple[Place, _Listening]] = []
    for model in draft.models:
        args = model.get("launch", "args")
        mine = _Listening.at(args.get("host").value, args.get("port"), "127.0.0.1")
        if mine is None:
            continue
        own = next((one for one in _own_ports(draft) if one.clashes(mine)), None)
        if own is not None:
            yield mine.place.problem(f"port {mine.port} is the gateway's own, {'.'.join(map(str, own.place.path))}")
        else:
            same = (place for place, one in before if one.clashes(mine))
            yield from _given_twice(draft, model, same, mine.place, f"port {mine.port}")
        before.append((model, mine))


def _launch_sockets(draft: Draft) -> Iterator[Problem]:
    """Fixed sockets of launched servers: whoever starts second would put its own in the place of the first one's."""
    before: list[Place] = []
    for model in draft.models:
        mine = model.get("launch", "args", "uds")
        if not _is_text(mine):
            continue
        same = (one for one in before if one.get("launch", "args", "uds").value == mine.value)
        yield from _given_twice(draft, model, same, mine, mine.value)
        before.append(model)


def _given_twice(draft: Draft, model: Place, same: Iterable[Place], mine: Place, what: str) -> Iterator[Problem]:
    """A place to listen on that is said at ``mine``, where one of the models that have the ``same`` may run at the same time."""
    other = next((one for one in same if not _take_turns(draft, one, model)), None)
    if other is not None:
        yield mine.problem(f"{what} is given to `{other.get('id').value}` too, and both may run at once")


class _Listening(NamedTuple):
    """Something that will listen."""

    host: str
    port: int
    place: Place

    @classmethod
    def at(cls, host: object, place: Place, default_host: str, default_port: int | None = None) -> _Listening | None:
        """None where no port is fixed."""
        value = default_port if place.value is None else place.value
        fixed = not isinstance(value, bool) and re.fullmatch("[0-9]{1,5}", str(value)) is not None and int(str(value)) > 0
        return cls(str(host or default_host), int(str(value)), place) if fixed else None

    def clashes(self, other: _Listening) -> bool:
        together = self.host == other.host or any(host in _WILDCARD_HOSTS for host in (self.host, other.host))
        return self.port == other.port and together


def _own_ports(draft: Draft) -> Iterator[_Listening]:
    """The data port and the admin port, whether written or not."""
    server = draft.top.get("server")
    admin = server.get("admin")
    data_port = _Listening.at(server.get("host").value, server.get("port"), "0.0.0.0", 8000)  # noqa: S104  the default
    yield from filter(None, (data_port, _Listening.at(admin.get("host").value, admin.get("port"), "127.0.0.1", 9090)))


def _own_places(draft: Draft) -> Iterator[Problem]:
    """Replicas cannot listen in one place."""
    for model in draft.models:
        launch = model.get("launch")
        replicas, args = launch.get("replicas").value, launch.get("args")
        if type(replicas) is int and replicas > 1:
            for name in [name for name in ("port", "uds") if args.get(name).value is not None]:
                yield args.get(name).problem(f"{replicas} replicas cannot share one {name}; leave it out, and each gets its own socket")


def _groups(draft: Draft) -> Iterator[Problem]:
    groups = [group.get("id") for group in draft.top.each("groups")]
    yield from _repeated(groups, "group")
    known = {group.value for group in groups if isinstance(group.value, str)}
    for model in draft.models:
        group = model.get("launch", "group")
        if known and isinstance(group.value, str) and group.value not in known:
            yield group.problem(f"names no group{did_you_mean(group.value, known)}")


def _eager_in_groups(draft: Draft) -> Iterator[Problem]:
    """A group that cannot run what is to be started with the gateway."""
    bounds = {str(group.get("id").value): group.get("max_running").value for group in draft.top.each("groups")}
    eager = Counter[str]()
    for model in draft.models:
        launch = model.get("launch")
        group, start = launch.get("group").value, launch.get("start")
        if not isinstance(group, str) or start.value not in (None, "eager"):
            continue
        eager[group] += 1
        bound = bounds.get(group)
        bound = 1 if bound is None else bound
        if isinstance(bound, int) and eager[group] > bound:
            yield start.problem(f"the group `{group}` runs {bound} at once, and more of its models are eager; write on_demand")


def _idle_order(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        launch = model.get("launch")
        stop, sleep = (_seconds(launch.get(name)) for name in ("idle_stop", "idle_sleep"))
        if stop is not None and sleep is not None and stop <= sleep:
            yield launch.get("idle_sleep").problem("the servers would be stopped before they could sleep: idle_stop is not longer")


def _seconds(place: Place) -> float | None:
    try:
        return parse_duration(place.value)
    except ValueError:
        return None


def _launched_loras(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        for lora in model.each("loras"):
            if model.get("launch").value is not None and isinstance(lora.value, dict) and lora.get("path").value is None:
                yield lora.problem("path is missing: where the launched server loads the adapter from")


def _body_fields(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        refused = [place.value for place in model.get("body").each("refuse")]
        for place in model.get("body").each("allow"):
            if place.value in refused:
                yield place.problem("is in body.refuse too; a field is allowed or refused")


def _fallbacks(draft: Draft) -> Iterator[Problem]:
    for model in draft.models:
        own = {name.value for name in _names(model) if isinstance(name.value, str)}
        for place in model.each("fallbacks"):
            if not isinstance(place.value, str):
                continue
            if place.value in own:
                yield place.problem("a model cannot be its own fallback")
            elif place.value not in draft.known:
                yield place.problem(f"names no model{did_you_mean(place.value, draft.known)}")


def _default_model(draft: Draft) -> Iterator[Problem]:
    place = draft.top.get("default_model")
    if isinstance(place.value, str) and place.value not in draft.known:
        yield place.problem(f"names no model{did_you_mean(place.value, draft.known)}")


def _fallback_loops(draft: Draft) -> Iterator[Problem]:
    """Models that would send each other the requests that none of them can take: the first such loop is told."""
    owners = {name.value: number for number, model in enumerate(draft.models) for name in _names(model) if isinstance(name.value, str)}
    ways = [{owners.get(str(place.value)): place for place in model.each("fallbacks")} for model in draft.models]
    order = TopologicalSorter({number: [other for other in others if other not in (None, number)] for number, others in enumerate(ways)})
    try:
        order.prepare()
    except CycleError as error:
        loop = error.args[1][::-1]  # each is followed by one of its fallbacks; the last is the first again
        places = [ways[model][other] for model, other in pairwise(loop)]
        yield places[0].problem(f"goes round in a loop: {' -> '.join(str(place.value) for place in [*places, places[0]])}")


def _some_keys(draft: Draft) -> Iterator[Problem]:
    keys, other = draft.top.get("keys"), draft.top.get("keys_file")
    readable = draft.keys_file is None or draft.keys_file.whole
    if not draft.keys and readable and keys.value in (None, []):
        place = keys if other.value is None else other
        yield place.problem(
            "no keys are configured, so nobody could use the gateway and it refuses to start; `vllm-gateway keys new --id NAME` makes one"
        )


def _unique_keys(draft: Draft) -> Iterator[Problem]:
    yield from _repeated((key.get("id") for key in draft.keys), "key id")
    yield from _repeated((place for key in draft.keys for place in _hashes(key)), "hash", "; a key belongs to one id")


def _hashes(key: Place) -> Iterator[Place]:
    given = key.get("hash")
    for one in given.items() if isinstance(given.value, list) else [given]:
        place = one.get("hash") if isinstance(one.value, dict) else one
        if isinstance(place.value, str):
            yield Place(place.source, place.path, place.value.lower())


def _of_tokens(draft: Draft) -> list[Place]:
    """The ids of entries of keys as which tokens count."""
    named = (issuer.get("keys") for issuer in draft.top.each("jwt"))
    return [place for each in named for place in (each.items() if isinstance(each.value, list) else [each]) if _is_text(place)]


def _issuers(draft: Draft) -> Iterator[Problem]:
    if draft.top.get("jwt").value is None:
        return
    yield from _repeated((issuer.get("issuer") for issuer in draft.top.each("jwt")), "issuer")
    anonymous = {key.get("id").value: key.get("anonymous").value is True for key in draft.keys if _is_text(key.get("id"))}
    yield from _repeated(_of_tokens(draft), "entry of keys", "; subjects of two issuers would be taken for each other")
    for place in _of_tokens(draft):
        if place.value not in anonymous:
            yield place.problem(f"names no entry of keys{did_you_mean(place.value, anonymous)}")
        elif anonymous[place.value]:
            yield place.problem("is the entry for requests with no key; a token needs another")
    of_tokens = {place.value for place in _of_tokens(draft)}
    for key in draft.keys:
        begun = str(key.get("id").value).split("/")
        if any("/".join(begun[:length]) in of_tokens for length in range(1, len(begun))):
            yield key.get("id").problem("a subject of a token could have this id, behind that of its entry; choose another")
    for issuer in draft.top.each("jwt"):
        keys = issuer.get("keys")
        if isinstance(keys.value, list) and len(keys.value) > 1 and issuer.get("claims", "key").value is None:
            yield keys.problem("which of them a token counts as is not said; write claims.key, or one entry alone")


def _hash_or_anonymous(draft: Draft) -> Iterator[Problem]:
    first: Place | None = None
    of_tokens = {place.value for place in _of_tokens(draft)}
    for key in draft.keys:
        if not isinstance(key.value, dict):
            continue
        anonymous, hashes = key.get("anonymous"), key.get("hash")
        if anonymous.value is not True:
            if hashes.value in (None, []) and str(key.get("id").value) not in of_tokens:
                yield hashes.problem(
                    "is missing: sha256:… of the key (`vllm-gateway keys new` makes both), or anonymous: true for requests with no key"
                )
            continue
        if hashes.value is not None:
            yield hashes.problem("the anonymous entry has no hash: it is for requests with no key")
        if first is not None:
            yield anonymous.problem(f"only one entry can be anonymous; `{first.get('id').value}` is")
        first = first or key


def _scopes(draft: Draft) -> Iterator[Problem]:
    """Patterns are judged once each, however many keys share one."""
    dangling: dict[str, bool] = {}
    for key in draft.keys:
        for place in key.each("models"):
            pattern = place.value
            if not isinstance(pattern, str):
                continue
            if pattern not in dangling:
                dangling[pattern] = not any(matches(pattern, name) for name in draft.known)
            if dangling[pattern]:
                yield place.problem(f"matches no model{did_you_mean(pattern, draft.known)}")


def _teams(draft: Draft) -> Iterator[Problem]:
    teams = [team.get("id") for team in draft.top.each("teams")]
    yield from _repeated(teams, "team")
    known = {team.value for team in teams if isinstance(team.value, str)}
    for key in draft.keys:
        team = key.get("team")
        if isinstance(team.value, str) and team.value not in known:
            yield team.problem(f"names no team{did_you_mean(team.value, known)}")


def _ports(draft: Draft) -> Iterator[Problem]:
    match list(_own_ports(draft)):
        case [data, admin] if data.clashes(admin):
            yield admin.place.problem(f"the admin port and the data port are both {data.port}; they need one each")


def _limited_models(draft: Draft) -> Iterator[Problem]:
    for limits in draft.limits:
        for place in limits.each("models"):
            if isinstance(place.value, str) and not any(matches(place.value, name) for name in draft.known):
                yield place.problem(f"matches no model{did_you_mean(place.value, draft.known)}")


def _empty_limits(draft: Draft) -> Iterator[Problem]:
    for limits in draft.limits:
        if "models" in limits.path and isinstance(limits.value, dict) and set(limits.value) == {"models"}:
            yield limits.problem("limits nothing; write e.g. requests_per_minute")


def _priced(draft: Draft) -> Iterator[Problem]:
    """Without a price, a limit of cost would never be reached."""
    if any(isinstance(model.get("price").value, dict) for model in draft.models):
        return
    for limits in draft.limits:
        for name in ("cost_per_day", "cost_per_month"):
            if limits.get(name).value is not None:
                yield limits.get(name).problem("no model has a price, so nothing would cost anything; write models[].price")


def _divided_bounds(draft: Draft) -> Iterator[Problem]:
    """A worker whose part of a bound is nothing would serve nobody."""
    workers = draft.top.get("server", "workers").value
    if not isinstance(workers, int):
        return
    for most in (draft.top.get("server", "max_inflight"), *(model.get("max_inflight") for model in draft.models)):
        if isinstance(most.value, int) and 0 < most.value < workers:
            yield most.problem(f"{workers} workers cannot share {most.value} requests: each needs at least one, or server.workers is less")


_CHECKS: tuple[Callable[[Draft], Iterator[Problem]], ...] = (
    _some_models,
    _unique_names,
    _unique_mounts,
    _unique_servers,
    _one_origin,
    _one_discovery,
    _gpus,
    _launch_settings,
    _launch_ports,
    _launch_sockets,
    _own_places,
    _groups,
    _eager_in_groups,
    _idle_order,
    _launched_loras,
    _body_fields,
    _fallbacks,
    _default_model,
    _fallback_loops,
    _some_keys,
    _unique_keys,
    _hash_or_anonymous,
    _issuers,
    _scopes,
    _teams,
    _ports,
    _limited_models,
    _empty_limits,
    _priced,
    _divided_bounds,
)
