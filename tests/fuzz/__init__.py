"""Fuzzing: what is fed to the gateway's own parsers, and what must hold whatever it is."""
