"""Decoding and following KV cache events."""
