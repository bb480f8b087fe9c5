"""Decide when a request may proceed: concurrency limits, queues for models, and the memory for request bodies.

It owns what one worker holds at once; rates and budgets are in ``limits``. Nothing here reads a request or sends one. Start with
``inflight``, the limit on all requests; ``queue`` has a queue per model, whose order is that of ``fair_queue``.
"""
