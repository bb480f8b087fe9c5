"""Starts the probe in the gateway's worker process: every interpreter with this folder in its PYTHONPATH imports this module first."""

import sys

if "gateway.worker.process" in sys.orig_argv:
    from tests.benchmarks.pauses.probe import measure_uvloop

    measure_uvloop()
