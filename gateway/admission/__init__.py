"""Decide when a request may proceed: concurrency limits, queues for models, and the memory for request bodies.

It owns everything that one worker holds concurrently; rates and budgets are in ``limits``. Nothing here reads a request or sends one.
Start with ``inflight``, the limit on all requests; ``queue`` has a queue per model, in the order that ``fair_queue`` decides, and
``deadlines`` refuses the requests that would be late.
"""
