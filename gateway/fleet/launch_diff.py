"""What a change of the configuration means for the servers of a launched model that run. Pure.

The rule: a server is replaced only where what it was started by has changed, and one after the other wherever the GPUs allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from upstream.launcher.lifecycle import LaunchSpec
from upstream.vllm.command_line import LaunchSettings


@dataclass(frozen=True, slots=True)
class Reshape:
    """How the servers that run become those that are wanted: these ``leave``, these are replaced, these are new."""

    leave: tuple[str, ...] = ()
    renew: tuple[LaunchSpec, ...] = ()
    add: tuple[LaunchSpec, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leave or self.renew or self.add)


def shape(specs: Sequence[LaunchSpec]) -> Mapping[str, LaunchSettings]:
    """What decides whether servers have changed: how each is started, without what a running one need not know."""
    return {spec.name: replace(spec.settings, drain=0.0) for spec in specs}


def reshape(running: Sequence[LaunchSpec], wanted: Sequence[LaunchSpec]) -> Reshape:
    """From the servers that run to those that are wanted."""
    now, then = shape(running), shape(wanted)
    return Reshape(
        leave=tuple(name for name in now if name not in then),
        renew=tuple(spec for spec in wanted if spec.name in now and now[spec.name] != then[spec.name]),
        add=tuple(spec for spec in wanted if spec.name not in now),
    )


def can_roll(running: Sequence[LaunchSpec], change: Reshape) -> bool:
    """Whether servers can be replaced one after the other: none of them takes a GPU that another one has."""
    gpus = {spec.name: set(spec.settings.gpus) for spec in running if spec.name not in change.leave}
    for spec in (*change.renew, *change.add):
        taken = set(spec.settings.gpus) - gpus.get(spec.name, set())
        if any(taken & theirs for name, theirs in gpus.items() if name != spec.name):
            return False
    return True
