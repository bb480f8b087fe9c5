"""Which requests enter, and in which order they wait: in-flight limits, queues, fair queueing, memory for bodies.

It counts requests, not tokens or money; those belong to ``limits``.
Start with ``inflight`` for the bounds and ``queue`` for waiting.
"""
