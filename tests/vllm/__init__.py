"""The real vLLM on the CPU: how it is installed, the tiny models it serves here, and what it is held to."""
