"""A long run: ``python -m benchmarks.soak``."""
