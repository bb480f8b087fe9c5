"""OpenID Connect: the authorization request, its response, the code exchange, tokens, and what their claims grant.

The rule: everything but ``provider_client`` is pure. Nothing that an issuer sends is used before it was verified, or is shown to people.
"""
