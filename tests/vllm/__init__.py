"""Tests with the real vLLM on the CPU: its installation, its tiny models, and the comparison with the gateway."""
