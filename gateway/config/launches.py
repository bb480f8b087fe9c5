"""Facts about launched models from the configuration: their GPUs, and whether the gateway may stop them. Pure."""

from __future__ import annotations

from gateway.config.models import Config, Launch, Model


def all_gpus(launch: Launch) -> frozenset[int]:
    """Return the GPUs of all replicas."""
    return frozenset(gpu for replica in launch.gpus or () for gpu in replica)


def may_be_stopped(config: Config, model: Model) -> bool:
    """Return whether a model is launched and not always up.

    It starts on demand, stops or sleeps when idle, shares a group, or shares a GPU with a model that starts on demand.
    """
    launch = model.launch
    if launch is None:
        return False
    if launch.start == "on_demand" or launch.idle_stop is not None or launch.idle_sleep is not None or launch.group is not None:
        return True
    launches = (other.launch for other in config.models if other.launch is not None)
    return any(other.start == "on_demand" and all_gpus(launch) & all_gpus(other) for other in launches)
