"""Numerics of steps and chunks: pure functions of a compiled model and arrays."""
