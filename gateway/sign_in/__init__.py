"""People who sign in: OpenID Connect, one-time sign-in links, sessions, and their tables.

The rule: the protocol modules do no I/O, and every value that comes back from a browser or a provider is verified before it is used. A
session cookie is checked with a key and the revoked IDs of a snapshot, without a database. Start with ``service``, then ``authorization``
and ``tokens`` for the protocol, and ``sessions`` for the cookie.
"""
