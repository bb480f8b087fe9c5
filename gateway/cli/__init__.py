"""The commands of ``vllm-gateway``.

Commands parse arguments and print; the work is done by the packages below.
Start with ``main``.
"""
