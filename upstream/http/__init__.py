"""HTTP/1.1 to one server: connections, batched writes, server-sent events, deadlines, errors.

It knows nothing of models, policies or vLLM.
Start with ``connection``, then ``errors``.
"""
