"""The KV cache events of vLLM: what is cached on a server, as keys that a prompt's tokens can be compared with.

Pure: it decodes and decides, and it opens no socket. ``follower`` follows the events of one engine, ``blocks`` holds what is cached there,
``keys`` computes the keys of blocks and prompts, ``batch`` decodes vLLM's messages.
Start with ``follower``.
"""
