"""Roles: who may do what on the admin port and the admin socket. Pure.

The rule: a decision depends only on the actor and on the permission of a route, and every route has its permission in one table. It does
not authenticate: the admin port's guard, the admin socket and the sign-in make actors. Start with ``actor``, then ``permissions``.
"""
