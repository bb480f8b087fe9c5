"""Launched servers: start, watch, restart, stop.

``lifecycle`` says which states there are and how long to pause, ``kept`` is one process under its keeper, ``logfile``
its log, ``server`` one launched server over all its processes, ``launcher`` all of them. It runs in the control
process; nothing here touches a client's bytes.
"""

from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import Backoff, LaunchSpec, LaunchState, LaunchStatus

__all__ = ["Backoff", "LaunchSpec", "LaunchState", "LaunchStatus", "Launcher"]
