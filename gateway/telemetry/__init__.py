"""Report what happened: metrics, shared counters, the record of a request, access log, traces, token rates.

It owns how facts are counted and written, and decides nothing about requests; it imports no proxy, no client and no key check.
Start with ``request_record``, the value that all reports are made from, then ``metrics``.
"""
