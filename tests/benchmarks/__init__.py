"""Measurements of the gateway beside its peers: ``make bench``."""
