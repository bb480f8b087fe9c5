"""Keys as entries of configuration files: created, rotated, revoked, listed, imported.

It edits files for commands and never serves a request.
Start with ``key_file``.
"""
