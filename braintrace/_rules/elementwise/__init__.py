"""Traces of rules whose Jacobian couples no elements."""
