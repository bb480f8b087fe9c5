"""What the tests of the matrix of faults share."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("FAULTS_FULL"))
"""The whole size (``make faults``): thousands of sockets; otherwise one that an ordinary run can bear."""
