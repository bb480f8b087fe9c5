"""The difference between the running servers of a launched model and the servers in the configuration. Pure.

The rule: a server is replaced only if its launch settings have changed. Servers are replaced one at a time if the GPUs allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from upstream.launcher.lifecycle import LaunchSpec
from upstream.vllm.command_line import LaunchSettings


@dataclass(frozen=True, slots=True)
class LaunchDiff:
    """The changes that make the running servers match the configuration. It is false if nothing changes."""

    removed: tuple[str, ...] = ()
    replaced: tuple[LaunchSpec, ...] = ()
    added: tuple[LaunchSpec, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.replaced or self.added)


def comparable(specs: Sequence[LaunchSpec]) -> Mapping[str, LaunchSettings]:
    """Return the settings that decide whether a server has changed, by name.

    The drain time may change while a server runs. The scale-out routes are not worth a restart: they are missing until the next one.
    """
    return {spec.name: replace(spec.settings, drain=0.0, scale_out=False) for spec in specs}


def launch_diff(running: Sequence[LaunchSpec], wanted: Sequence[LaunchSpec]) -> LaunchDiff:
    """Compare the running servers with the wanted ones."""
    before, after = comparable(running), comparable(wanted)
    return LaunchDiff(
        removed=tuple(name for name in before if name not in after),
        replaced=tuple(spec for spec in wanted if spec.name in before and before[spec.name] != after[spec.name]),
        added=tuple(spec for spec in wanted if spec.name not in before),
    )


def can_replace_one_at_a_time(running: Sequence[LaunchSpec], diff: LaunchDiff) -> bool:
    """Return whether no replaced or added server takes a GPU of another running server."""
    gpus = {spec.name: set(spec.settings.gpus) for spec in running if spec.name not in diff.removed}
    for spec in (*diff.replaced, *diff.added):
        taken = set(spec.settings.gpus) - gpus.get(spec.name, set())
        if any(taken & others for name, others in gpus.items() if name != spec.name):
            return False
    return True
