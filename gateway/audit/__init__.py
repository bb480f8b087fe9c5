"""The audit log: an entry for each change and each refused attempt, in a chain that shows later edits.

It does not decide what may be changed, and it contains no secrets. The rule: a change is acknowledged only after its entry is durable.
Start with ``entry``, then ``chain``.
"""
