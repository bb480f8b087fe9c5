"""Owns the measurement of event-loop pauses: how long the callbacks of a proxy's event loop run under a mixed load.

It must not change the product: `site/sitecustomize.py` starts the probe in the gateway's worker process. A reader starts with `probe.py`.
"""
