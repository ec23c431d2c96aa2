"""Benchmarks: one runnable file a question."""
