"""The accounting run: play mixed requests and faults through a whole gateway, and compare each row of its ledger with what was delivered.

It owns the workload, the clients, the comparison and the published table. It must not read a count from the gateway's own counting code.
Start with ``__main__``; ``comparison`` has the rules.
"""
