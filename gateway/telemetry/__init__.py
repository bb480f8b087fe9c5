"""What is recorded about requests and processes: metrics, shared counters, the access log, traces, dependencies.

It observes and never changes a request or a response.
Start with ``request_record``, the one value of which all others are made.
"""
