"""The worker process that serves the data port, and its supervision by control.

A worker never waits for control, disk, a database or Redis for a request that needs none.
Start with ``process`` for the process, ``app`` for its wiring, ``supervisor`` for control's side.
"""
