"""Jacobians of a step: per element, as diagonals, through maxima."""
