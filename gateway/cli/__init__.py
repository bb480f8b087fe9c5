"""The commands of ``vllm-gateway``.

Commands parse arguments and print output; other packages do the work.
Start with ``main``.
"""
