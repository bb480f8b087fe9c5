"""The servers of the configuration: their names, and for launched servers the launch settings with their GPUs. Pure.

The rule: every server has one name, which is created here and used by all parts of the gateway: ``MODEL#N`` for a launched server, the URL
for an external one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway import config as conf
from gateway.config import Config, plain_variables
from gateway.config.values import EVENTS_POLICY, kv_events_installed
from gateway.fleet.launch_diff import comparable
from upstream.launcher.lifecycle import LaunchSpec
from upstream.vllm.auto_max_inflight import Bounds, most_useful
from upstream.vllm.capabilities import task_of
from upstream.vllm.command_line import Adapter, LaunchSettings, flag_of
from upstream.vllm.presets import with_preset


@dataclass(frozen=True, slots=True)
class ConfiguredServer:
    """One server of one model. ``external`` is its entry in the configuration, None for a launched server."""

    name: str
    model: conf.Model
    external: conf.Server | None = None

    @property
    def served_model(self) -> str:
        """The name under which the server knows the model."""
        return (self.external.model if self.external else None) or self.model.id


def configured_servers(config: Config) -> tuple[ConfiguredServer, ...]:
    """Return every server of the configuration, in its order."""
    urls = Counter(server.url for model in config.models for server in model.servers or ())
    return tuple(server for model in config.models for server in _servers_of(model, urls))


def _servers_of(model: conf.Model, urls: Mapping[str, int]) -> Iterator[ConfiguredServer]:
    if model.launch is not None:
        yield from (ConfiguredServer(f"{model.id}#{number}", model) for number in range(model.launch.replicas))
    for server in model.servers or ():
        yield ConfiguredServer(server.url if urls[server.url] == 1 else f"{server.url}#{model.id}", model, server)


def model_of_launched(server: str) -> str:
    """Return the model ID of a launched server by the server's name. The configuration need not contain the model any longer."""
    return server.rpartition("#")[0]


def launches(config: Config) -> tuple[LaunchSpec, ...]:
    """Return what the launcher may be asked to start, for all models."""
    return tuple(spec for model in config.models for spec in launches_of(config, model))


def launches_of(config: Config, model: conf.Model) -> tuple[LaunchSpec, ...]:
    """Return the replicas of one model. The tuple is empty for a model that the gateway does not launch."""
    if (launch := model.launch) is None:
        return ()
    return tuple(
        LaunchSpec(f"{model.id}#{number}", _settings(config, model, launch, number), launch.startup_timeout)
        for number in range(launch.replicas)
    )


def limit_bounds(config: Config, model: conf.Model) -> Bounds:
    """Return the bounds of a limit that follows the load: a request for each worker; what a launched server runs, with a short queue."""
    if isinstance(model.max_inflight, int):
        return Bounds(min(config.server.workers, model.max_inflight), model.max_inflight)
    if model.launch is None:
        return Bounds(config.server.workers)
    given = {flag_of(name): value for name, value in with_preset(model.launch.preset, model.launch.args).items()}
    sequences, ranks = given.get("max-num-seqs"), given.get("data-parallel-size", 1)
    if "config" in given or not isinstance(sequences, int) or not isinstance(ranks, int):
        return Bounds(config.server.workers)
    return Bounds(config.server.workers, max(most_useful(sequences * ranks), config.server.workers))


def uses_kv_events(model: conf.Model) -> bool:
    """Return whether the model's policy uses the KV cache events of its servers, and this gateway can follow them."""
    return model.balance == EVENTS_POLICY and kv_events_installed()


def relaunched(before: Config, after: Config) -> frozenset[str]:
    """Return the IDs of models that ``after`` adds, or launches in another way than ``before``."""
    known = {model.id: comparable(launches_of(before, model)) for model in before.models}
    changed = (model.id for model in after.models if model.launch and comparable(launches_of(after, model)) != known.get(model.id))
    return frozenset(changed)


def exclusive_resources(launch: conf.Launch) -> frozenset[int | str]:
    """Return the resources that no other server can use at the same time: its GPUs, and its configured listening address."""
    args = {flag_of(key): value for key, value in launch.args.items()}
    addresses = set()
    if "uds" in args:
        addresses.add(f"unix:{args['uds']}")
    elif "port" in args:
        addresses.add(f"{args.get('host', '127.0.0.1')}:{args['port']}")
    return frozenset[int | str](launch.all_gpus) | addresses


def _settings(config: Config, model: conf.Model, launch: conf.Launch, number: int) -> LaunchSettings:
    # A permitted media host could redirect vLLM to a host that is not permitted, unless vLLM follows no redirects.
    hosts = model.body.media_hosts
    any_host = any(host.startswith("*") and "." not in host for host in hosts)
    no_redirects = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"} if hosts and not any_host else {}
    args = with_preset(launch.preset, launch.args)
    return LaunchSettings(
        model=launch.model or model.id,
        served_names=(model.id,),
        command=launch.command,
        args=args,
        env=no_redirects | plain_variables(launch.env),
        gpus=launch.gpus[number] if launch.gpus else (),
        adapters=tuple(Adapter(lora.id, lora.path) for lora in model.loras if lora.path is not None),
        sleeps=launch.idle_sleep is not None,
        drain=config.server.drain,
        cached_tokens=model.balance == EVENTS_POLICY,
        kv_events=uses_kv_events(model),
        scale_out=bool(model.resume) and launch.replicas > 1 and task_of(args) in (None, "chat"),
    )
