"""Self-service: people manage their own keys on the data port, below ``/portal/v1``.

The rule: a person reaches the keys that they have created, and as an owner those of their teams; nothing else exists for them. The policy
of a team is applied in ``gateway.store``, and sessions are checked by ``gateway.sign_in``. Start with ``access``, then ``routes``.
"""
