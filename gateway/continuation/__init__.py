"""Continue a stream on another server after its server is lost: the plan of a request, the record of its stream, and the paths.

The rule: a stream is continued only by a path that is exact for its request (docs/continuation.md). Otherwise it ends as before.
"""
