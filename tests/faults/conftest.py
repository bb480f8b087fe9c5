"""Shared definitions of the tests of the fault matrix."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("FAULTS_FULL"))
"""Run at full size, with thousands of sockets (``make faults``). The default is a size that fits an ordinary test run."""
