"""The engine of the simulator: slots, speed, prefix cache, metrics, and the bytes of a response.

It does not know the shape of a request or of a response: an endpoint gives it a job.
Start with ``job`` and ``generation``.
"""
