"""Owns the worker process, which serves the data port, and its supervision by control.

A worker never waits for control, a disk, a database or Redis for a request that does not need them. ``proxy`` serves the requests.
Start reading at ``process.py`` for the process, ``worker.py`` for its parts, ``drain.py`` for its end, and ``supervisor.py`` for
control's side.
"""
