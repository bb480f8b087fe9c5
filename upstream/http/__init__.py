"""HTTP/1.1 to one server: connections, batched writes, server-sent events, deadlines, errors.

It does not depend on models, policies or vLLM.
Start with ``connection``, then ``errors``.
"""
