"""Benchmarks of speed, memory and learning; see ``README.md``."""
