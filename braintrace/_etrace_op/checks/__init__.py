"""Checks of the rules of an operation: shapes, values, and hand-written rules."""
