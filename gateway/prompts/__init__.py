"""The facts about a request's prompt that balance policies use: affinity keys, blocks of text, token IDs, estimated tokens.

The package reads a parsed body and computes; it chooses no server and sends nothing, except the request for token IDs in ``token_keys``.
Start with ``balancing_facts``, then ``prefix`` for ``balance: prefix``, and ``blocks`` and ``token_plan`` for ``balance: cost``.
"""
