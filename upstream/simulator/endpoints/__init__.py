"""The inference endpoints of the simulator: the rules that vLLM 0.32 has for a request, and the shapes of its responses.

Each module is one API of vLLM. An endpoint converts a request to a job, and must not send bytes itself.
Start with ``chat``, on which messages, responses and batches build.
"""
