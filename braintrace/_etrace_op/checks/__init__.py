"""Checks of the rules of an operation: shapes, numbers, and rules written by hand."""
