"""Notices: webhooks and mail about budgets that are nearly used and keys that expire.

It decides nothing about requests, and only control runs it. The rule: a notice is stored before it is sent, and its ID is derived from what
it says, so each is sent at least once, and a receiver that ignores known IDs sees it once. Start with ``notice``, then ``service``.
"""
