"""Jacobians of a step, per element or as diagonals."""
