"""The life cycle of models and their servers: launched, put to sleep, woken, drained and stopped, or discovered.

It does not forward requests and does not talk to clients.
Start with ``fleet``. ``configured_servers`` and ``snapshot_builder`` derive everything from the configuration.
"""
