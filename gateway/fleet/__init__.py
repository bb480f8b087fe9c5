"""The life cycle of models: launched, put to sleep, woken, drained and stopped, or discovered.

It does not forward requests and does not talk to clients.
Start with ``fleet``; ``plan`` derives everything from the configuration.
"""
