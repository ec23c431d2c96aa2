"""Checks of a model, and diagnostics."""
