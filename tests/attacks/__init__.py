"""The attacks on identity, in one table: sign-in, sessions, other sites, privileges, keys and the audit log.

Owns ``table``, from which docs/attacks.md and docs/attacks-access.md are made, and the attacks that belong to no single module. The rule:
each row names the test that fails if the attack works, and that test is run once, wherever it is. Start with ``table``.
"""
