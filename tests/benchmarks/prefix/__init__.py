"""How often requests find their beginning cached, by the way their server is chosen: ``python -m tests.benchmarks.prefix``."""
